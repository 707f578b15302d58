"""Regeneration: prompts of all sources, several turns, own sampling parameters, by a server, and after a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import DatasetCard
from transformers import AutoTokenizer

from tests.builders import tiny_target
from tests.training.chat_server import ChatDouble
from training.answers.arguments import RegenerateArguments
from training.answers.local import batch_seed
from training.answers.plan import plan_batches, plan_requests
from training.answers.provenance import settings_of
from training.answers.regeneration import regenerate
from training.answers.served import end_of_turn_id
from training.common.files import JsonlAppender, read_jsonl, write_atomically
from training.common.targets import chat_template_hash, target_revision
from training.data.conversations import load_conversations
from training.data.prompts import continuation_ids, prompt_ids, read_prompts


ROOT = Path(__file__).parents[2]
# `A` and `U` start a turn, `#` (end of text) ends it: one character a token.
TEMPLATE = (
    "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}#{% endfor %}"
    "{% if add_generation_prompt %}A{% if enable_thinking is defined and not enable_thinking %}00{% endif %}{% endif %}"
)
PROMPTS = [
    {"turns": ["abc", "de", "f"], "source": "one", "license": "MIT"},
    {"text": "xyz", "source": "two", "license": "MIT"},
    {"turns": ["gh"], "source": "one", "license": "MIT", "temperature": 0.3, "top_p": 0.7, "seed": 5},
    {"turns": ["ij", "kl"], "source": "one", "license": "MIT", "max_new_tokens": 4},
]


@pytest.fixture
def workspace(tmp_path, tiny_tokenizer):
    tiny_target("llama").save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "target")
    write_prompts(tmp_path, PROMPTS)
    return tmp_path


def write_prompts(workspace, prompts):
    (workspace / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def arguments(workspace, **fields):
    defaults = {
        "target": str(workspace / "target"),
        "prompts": str(workspace / "prompts.jsonl"),
        "output": str(workspace / "answers.jsonl"),
        "max_new_tokens": 6,
        "batch_size": 3,
        "dtype": "float32",
        "max_prompt_tokens": 64,
    }
    return RegenerateArguments(**(defaults | fields))


def tokenizer_of(workspace):
    return AutoTokenizer.from_pretrained(workspace / "target")


def by_key(path):
    records = read_jsonl(path)
    keyed = {(record["prompt"], record["sample"], record["turn"]): record for record in records}
    assert len(keyed) == len(records), "an answer is there twice"
    return keyed


KEYS = {(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 0), (2, 0, 0), (3, 0, 0), (3, 0, 1)}


class TestPrompts:
    def test_all_sources_give_the_same_prompts(self, workspace):
        from datasets import Dataset, DatasetDict

        prompts = [{"turns": ["a", "b"]}, {"turns": ["c"]}]
        write_prompts(workspace, prompts)
        data = Dataset.from_list(prompts)
        data.to_parquet(workspace / "prompts.parquet")
        data.save_to_disk(workspace / "one")
        DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(workspace / "several")
        for name in ("prompts.jsonl", "prompts.parquet", "one", "several"):
            assert read_prompts(str(workspace / name)) == prompts
        assert read_prompts(str(workspace / "several"), split="test") == prompts[1:]
        # As `datasets` loads a dataset by its name: here, a folder of Parquet files.
        (workspace / "named").mkdir()
        data.rename_column("turns", "asked").to_parquet(workspace / "named" / "train.parquet")
        named = read_prompts(str(workspace / "named"), column="asked")
        assert [record["turns"] for record in named] == [["a", "b"], ["c"]]

    def test_a_column_of_texts(self, workspace):
        write_prompts(workspace, [{"question": "a"}])
        assert read_prompts(str(workspace / "prompts.jsonl"), column="question")[0]["turns"] == ["a"]
        with pytest.raises(ValueError, match="prompts_column.*`asked`.*question"):
            read_prompts(str(workspace / "prompts.jsonl"), column="asked")

    def test_wrong_sources(self, workspace):
        from datasets import Dataset, DatasetDict

        (workspace / "broken.parquet").write_text("no parquet")
        for name, match in (
            ("missing.parquet", "no file"),
            ("broken.parquet", "not a Parquet"),
            ("nowhere", "neither"),
        ):
            with pytest.raises(ValueError, match=match):
                read_prompts(str(workspace / name))
        DatasetDict({"test": Dataset.from_list([{"text": "a"}])}).save_to_disk(workspace / "several")
        with pytest.raises(ValueError, match="prompts_split"):
            read_prompts(str(workspace / "several"))

    def test_line_breaks_of_other_systems(self, workspace):
        text = "\ufeff" + "".join(json.dumps(prompt) + "\r\n" for prompt in PROMPTS) + "\r\n  \n"
        (workspace / "prompts.jsonl").write_bytes(text.encode())
        assert read_prompts(str(workspace / "prompts.jsonl")) == PROMPTS

    @pytest.mark.parametrize("content", ["", "\n", "<html>", "PAR1", '{"text": "a"}\n{"text": \n'])
    def test_files_of_no_prompts(self, workspace, content):
        """A broken last line is an error too, unless it looks like a record that was being written."""
        (workspace / "prompts.jsonl").write_text(content)
        with pytest.raises(ValueError, match="prompts.jsonl"):
            read_prompts(str(workspace / "prompts.jsonl"))

    def test_half_a_record_at_the_end_is_said(self, workspace, caplog):
        (workspace / "prompts.jsonl").write_text('{"text": "a"}\n{"text": "b')
        assert read_prompts(str(workspace / "prompts.jsonl")) == [{"text": "a"}]
        assert "line 2, which is left out" in caplog.text

    @pytest.mark.parametrize("prompt", [{"text": "\ud800"}, {"text": "\x00"}, [1]])
    def test_prompts_without_tokens(self, workspace, prompt):
        write_prompts(workspace, [prompt])
        tokenizer = tokenizer_of(workspace)
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match=r"[Pp]rompt"):
            plan_requests(arguments(workspace), tokenizer)

    def test_what_the_template_refuses(self, workspace):
        tokenizer = tokenizer_of(workspace)
        tokenizer.chat_template = "{{ raise_exception('no such role') }}"
        with pytest.raises(ValueError, match="chat template refuses.*abc.*no such role"):
            plan_requests(arguments(workspace), tokenizer)

    def test_thinking_is_passed_to_the_template(self, workspace):
        tokenizer = tokenizer_of(workspace)
        rendered = [tokenizer.decode(prompt_ids(tokenizer, {"text": "q"}, mode)) for mode in ("default", "on", "off")]
        assert rendered == ["Uq#A", "Uq#A", "Uq#A00"]

    def test_an_answer_is_split_as_it_follows_the_prompt(self):
        """A tokenizer that begins each text with a space, as Llama 2's does; a token that would reach into the prompt."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = {
            word: index
            for index, word in enumerate(["\u2581", "h", "i", "A", "hi", "Ah", "\u2581A", "\u2581h", "\u2581hi"])
        }
        merges = [("h", "i"), ("\u2581", "A"), ("\u2581", "h"), ("\u2581", "hi")]
        core = Tokenizer(models.BPE(words, merges))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
        assert tokenizer("hi").tokens() == ["\u2581hi"]
        assert tokenizer.convert_ids_to_tokens(continuation_ids(tokenizer, "A", "hi")) == ["hi"]
        assert tokenizer.convert_ids_to_tokens(continuation_ids(tokenizer, "h", "i")) == ["\u2581", "i"]


class TestOwnSampling:
    def test_a_prompt_wins_over_the_flags(self, workspace):
        requests, _ = plan_requests(arguments(workspace, temperatures=[0.0], top_p=0.9), tokenizer_of(workspace))
        sampling = [(r.temperature, r.top_p, r.max_new_tokens, r.seed) for r in requests]
        assert sampling == [(0.0, 0.9, 6, None), (0.0, 0.9, 6, None), (0.3, 0.7, 6, 5), (0.0, 0.9, 4, None)]
        samples, _ = plan_requests(arguments(workspace, samples_per_prompt=3), tokenizer_of(workspace))
        assert [r.seed for r in samples if r.prompt == 2] == [5, 6, 7]

    def test_an_own_seed_has_its_own_batch(self, workspace):
        """What a prompt with a seed is answered does not depend on the other prompts."""
        together = by_key(regenerate(arguments(workspace, temperatures=[0.3], top_p=0.7)))
        write_prompts(workspace, [{"text": "q"}, {"text": "r"}, PROMPTS[2]])
        alone = by_key(regenerate(arguments(workspace, output=str(workspace / "alone.jsonl"), seed=9)))
        assert together[2, 0, 0] == alone[2, 0, 0]
        assert together[2, 0, 0]["seed"] == 5

    @pytest.mark.parametrize(
        "wrong",
        [
            {"temperature": -1},
            {"temperature": "hot"},
            {"top_p": 0},
            {"top_p": 1.5},
            {"max_new_tokens": 2.5},
            {"seed": -1},
        ],
        ids=str,
    )
    def test_values_without_a_meaning(self, workspace, wrong):
        write_prompts(workspace, [{"text": "a"}, {"text": "b"} | wrong])
        with pytest.raises(ValueError, match=f"Prompt 1 .*`{next(iter(wrong))}="):
            regenerate(arguments(workspace))


class TestTurns:
    def test_every_turn_is_the_targets_answer_to_the_conversation_so_far(self, workspace):
        answers = by_key(regenerate(arguments(workspace, temperatures=[0.0])))
        assert set(answers) == KEYS
        target, tokenizer = tiny_target("llama"), tokenizer_of(workspace)
        for key, record in answers.items():
            if record["temperature"] == 0:
                ids = torch.tensor([record["prompt_ids"]])
                expected = target.generate(ids, max_new_tokens=record["max_new_tokens"], do_sample=False)
                assert record["answer_ids"] == expected[0, ids.shape[1] :].tolist()
            assert record["finish_reason"] == ("stop" if record["answer_ids"][-1] == 2 else "length")
            if key[2] > 0:
                earlier = answers[(*key[:2], key[2] - 1)]
                seen = [*earlier["prompt_ids"], *earlier["answer_ids"]]
                assert record["prompt_ids"][: len(seen)] == seen
                rest = tokenizer.decode(record["prompt_ids"][len(seen) :])
                assert rest.removeprefix("#") == f"U{PROMPTS[key[0]]['turns'][key[2]]}#A"

    def test_turns_are_one_conversation_to_training(self, workspace):
        path = regenerate(arguments(workspace, temperatures=[0.0]))
        answers = by_key(path)
        conversations, counts = load_conversations("", [str(path)], tokenizer_of(workspace), max_length=99)
        assert len(conversations) == 4
        assert counts == {"short_answers": 0, "long_prompts": 0, "cut": 0}
        (longest,) = [c for c in conversations if len(c.response_spans) == 3]
        last = answers[0, 0, 2]
        assert longest.input_ids == (*last["prompt_ids"], *last["answer_ids"])
        written = [answers[0, 0, turn]["answer_ids"] for turn in range(3)]
        assert torch.tensor(longest.input_ids)[longest.response_mask].tolist() == [
            token for ids in written for token in ids
        ]
        # Cut in the second answer: the first one still counts.
        second = answers[0, 0, 1]
        length = len(second["prompt_ids"]) + 3
        cut, counts = load_conversations("", [str(path)], tokenizer_of(workspace), max_length=length)
        (same,) = [c for c in cut if c.input_ids == longest.input_ids[:length]]
        assert int(same.response_mask.sum()) == len(written[0]) + 3
        assert counts["long_prompts"] == 1

    def test_a_template_that_forgets_makes_each_turn_a_conversation(self, workspace):
        tokenizer = tokenizer_of(workspace)
        forgets = "{% if m.role == 'assistant' %}A{{ m.content[-1:] }}#{% else %}U{{ m.content }}#{% endif %}"
        tokenizer.chat_template = (
            "{% for m in messages %}" + forgets + "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
        )
        tokenizer.save_pretrained(workspace / "target")
        path = regenerate(arguments(workspace, temperatures=[0.0]))
        conversations, _ = load_conversations("", [str(path)], tokenizer, max_length=99)
        assert len(conversations) == len(KEYS)
        texts = sorted((*r["prompt_ids"], *r["answer_ids"]) for r in read_jsonl(path))
        assert sorted(c.input_ids for c in conversations) == texts

    def test_bounds(self, workspace):
        assert set(by_key(regenerate(arguments(workspace, max_turns=1)))) == {key for key in KEYS if key[2] == 0}
        short = arguments(workspace, max_prompt_tokens=14, output=str(workspace / "short.jsonl"))
        answers = by_key(regenerate(short))
        assert (0, 0, 0) in answers
        assert (0, 0, 2) not in answers
        assert all(len(record["prompt_ids"]) <= 14 for record in answers.values())
        unfinished = sum(key not in answers for key in ((0, 0, 2), (1, 0, 0), (2, 0, 0), (3, 0, 1)))
        assert json.loads((workspace / "short.meta.json").read_text())["unfinished_conversations"] == unfinished
        tokenizer = tokenizer_of(workspace)
        tokenizer.chat_template = None
        tokenizer.save_pretrained(workspace / "target")
        (workspace / "target" / "chat_template.jinja").unlink(missing_ok=True)
        with pytest.raises(ValueError, match="max_turns=1"):
            regenerate(arguments(workspace, output=str(workspace / "plain.jsonl"), max_turns=2))


class TestServer:
    def run(self, workspace, double, **fields):
        options = {"server": double.url, "model": "m", "concurrency": 2, "timeout": 5.0}
        return regenerate(arguments(workspace, **(options | fields)))

    def test_conversations(self, workspace):
        with ChatDouble() as double:
            answers = by_key(self.run(workspace, double, temperatures=[0.0, 0.8], thinking="off"))
        assert set(answers) == KEYS
        tokenizer = tokenizer_of(workspace)
        last = answers[0, 0, 2]
        conversation = tokenizer.decode([*last["prompt_ids"], *last["answer_ids"]])
        assert conversation == "Uabc#Aababc#Ude#Aabde#Uf#A00abf#"
        assert {record["finish_reason"] for record in answers.values()} == {"stop"}
        bodies = {body["messages"][-1]["content"]: body for body in double.bodies}
        assert [m["content"] for m in bodies["f"]["messages"]] == ["abc", "ababc", "de", "abde", "f"]
        assert {"temperature": 0.3, "top_p": 0.7, "seed": 5, "max_tokens": 6}.items() <= bodies["gh"].items()
        assert (bodies["xyz"]["temperature"], bodies["kl"]["max_tokens"]) == (0.8, 4)
        assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in double.bodies)
        assert len({body["seed"] for body in double.bodies}) == len(double.bodies)
        assert json.loads((workspace / "answers.meta.json").read_text())["thinking"] == "off"

    def test_default_thinking_is_left_to_the_template(self, workspace):
        with ChatDouble() as double:
            self.run(workspace, double, limit=1)
        assert "chat_template_kwargs" not in double.bodies[0]

    def test_an_answer_cut_short_does_not_end(self, workspace):
        cut = {"choice": {"finish_reason": "length"}}
        with ChatDouble(lambda number, body: cut if body["messages"][-1]["content"] == "xyz" else None) as double:
            answers = by_key(self.run(workspace, double))
        assert answers[1, 0, 0]["finish_reason"] == "length"
        assert [answers[key, 0, 0]["answer_ids"][-1] == 2 for key in (1, 2)] == [False, True]

    def test_concurrency_is_bounded_and_used(self, workspace):
        write_prompts(workspace, [{"text": "q"}] * 12)
        three_at_once = threading.Barrier(3, timeout=30)  # broken, and the request failed, if fewer come together
        with ChatDouble(lambda number, body: three_at_once.wait() and None) as double:
            answers = self.run(workspace, double, concurrency=3)
        assert double.most_active == 3
        assert len(by_key(answers)) == 12

    def test_it_gets_through_a_server_that_misbehaves(self, workspace):
        """The same answers as from a server that works, whatever fails in between."""
        fates = [
            {"status": 500},
            {"cut": "in the middle"},
            {"status": 429, "headers": {"Retry-After": "0.1"}},
            {"stall": True},
            {"cut": "without a length"},
        ]
        with ChatDouble(
            lambda number, body: fates[number // 2] if number % 2 == 0 and number < 10 else None
        ) as double:
            answers = by_key(self.run(workspace, double, timeout=0.5))
        with ChatDouble() as double:
            undisturbed = by_key(self.run(workspace, double, output=str(workspace / "other.jsonl")))
        assert answers == undisturbed

    def test_failures_are_reported_and_tried_again(self, workspace, caplog):
        refuse = {"status": 400, "content": "no"}
        with ChatDouble(lambda number, body: refuse if body["messages"][-1]["content"] == "de" else None) as double:
            path = self.run(workspace, double, max_failures=1)
        assert set(by_key(path)) == KEYS - {(0, 0, 1), (0, 0, 2)}
        assert "1 requests failed" in caplog.text
        assert "Prompt 0, sample 0, turn 1 failed" in caplog.text
        assert json.loads((workspace / "answers.meta.json").read_text())["failed_requests"] == 1
        with ChatDouble() as double:
            assert set(by_key(self.run(workspace, double))) == KEYS
        assert len(double.bodies) == 2

    def test_too_many_failures_stop_the_run(self, workspace):
        refuse = {"status": 401, "content": "bad key"}
        stops = pytest.raises(ValueError, match="max_failures=2.*401: bad key.*start again")
        with ChatDouble(lambda number, body: refuse) as double, stops:
            self.run(workspace, double, max_failures=2)
        assert len(double.bodies) <= 5

    def test_half_a_surrogate_pair_is_a_failed_request(self, workspace):
        with ChatDouble(answer=lambda body: "a\ud800") as double, pytest.raises(ValueError, match="surrogate"):
            self.run(workspace, double, max_failures=0)

    def test_a_silent_server_does_not_hold_up_the_end(self, workspace):
        """What the interpreter waits for at its end are threads that are no daemons."""
        fates = [{"stall": True}, {"status": 400, "content": "no"}]
        before = set(threading.enumerate())
        with ChatDouble(lambda number, body: fates[min(number, 1)]) as double:
            with pytest.raises(ValueError, match="max_failures"):
                self.run(workspace, double, max_failures=0, timeout=60.0)
            left = set(threading.enumerate()) - before
            assert all(thread.daemon for thread in left)

    def test_another_template_on_the_server_is_found(self, workspace):
        usage = {"fields": {"usage": {"prompt_tokens": 40}}}
        with ChatDouble(lambda number, body: usage) as double:
            with pytest.raises(ValueError, match=r"counts 40 prompt tokens.*gives \d+.*check-prompt-tokens"):
                self.run(workspace, double)
            assert set(by_key(self.run(workspace, double, check_prompt_tokens=False))) == KEYS

    def test_the_end_of_a_turn_is_the_templates(self, workspace):
        tokenizer = tokenizer_of(workspace)
        assert end_of_turn_id(tokenizer, str(workspace / "target")) == 2
        generation = json.loads((workspace / "target" / "generation_config.json").read_text())
        (workspace / "target" / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [2, 7]}))
        tokenizer.chat_template = TEMPLATE.replace("#", tokenizer.decode([7]))
        assert end_of_turn_id(tokenizer, str(workspace / "target")) == 7


class TestKill:
    def test_a_file_cut_anywhere_is_completed_to_the_same_file(self, workspace):
        """In-process, byte for byte: a batch that was cut in the middle is drawn again as a whole."""
        write_prompts(workspace, [*PROMPTS, *({"text": text} for text in ("m", "n", "o", "p", "q"))])
        path = regenerate(arguments(workspace, temperatures=[0.8]))
        whole = path.read_bytes()
        for place in (0, 1, len(whole) // 5, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:place])
            assert regenerate(arguments(workspace, temperatures=[0.8])).read_bytes() == whole

    @pytest.mark.parametrize(
        "after", [0.1, pytest.param(0.0, marks=pytest.mark.slow), pytest.param(0.3, marks=pytest.mark.slow)]
    )
    def test_kill_9_with_a_server(self, workspace, after):
        """Killed while answers come in, then started again: every answer once, none asked for twice that was written."""
        write_prompts(workspace, [{"turns": [f"a{index}", "b"]} for index in range(40)])
        flags = {"prompts": workspace / "prompts.jsonl", "output": workspace / "answers.jsonl", "model": "m"}
        flags |= {"target": workspace / "target", "concurrency": 4, "max_new_tokens": 6}
        command = [sys.executable, "-m", "training.regenerate"]
        command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        path = workspace / "answers.jsonl"
        with ChatDouble(lambda number, body: time.sleep(0.02)) as double:
            command += ["--server", double.url]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(command, cwd=workspace, env=environment, stderr=subprocess.DEVNULL)
            while not double.bodies:
                assert process.poll() is None
                time.sleep(0.01)
            time.sleep(after)
            process.send_signal(signal.SIGKILL)
            process.wait()
            written = set(by_key(path)) if path.is_file() else set()
            assert len(written) < 80, "killed too late to test anything"
            asked = len(double.bodies)
            options = {"server": double.url, "model": "m", "target": str(workspace / "target")}
            whole = by_key(regenerate(arguments(workspace, concurrency=4, max_prompt_tokens=512, **options)))
        assert set(whole) == {(prompt, 0, turn) for prompt in range(40) for turn in range(2)}
        assert len(double.bodies) - asked == 80 - len(written)

    def test_what_a_killed_writer_left_is_removed_by_the_next_one(self, tmp_path):
        """And nothing else: not what another process is writing, nor files of other names."""
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        others = {f".a.json.{os.getppid()}.tmp", f".b.json.{ended.pid}.tmp", "a.json.1.tmp", ".a.json.x.tmp"}
        for name in (f".a.json.{ended.pid}.tmp", *others):
            (tmp_path / name).write_text("half")
        write_atomically(tmp_path / "a.json", "whole")
        assert {path.name for path in tmp_path.iterdir()} == {"a.json", *others}

    def test_half_a_character_at_the_end(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"a": 1}\n{"a": "' + "ä".encode()[:1])
        assert read_jsonl(path) == [{"a": 1}]
        with JsonlAppender(path) as file:
            file.write({"a": 2})
        assert read_jsonl(path) == [{"a": 1}, {"a": 2}]

    def test_a_last_line_without_a_line_break_is_kept(self, workspace):
        path = regenerate(arguments(workspace))
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        regenerate(arguments(workspace))
        assert path.read_bytes() == whole
        path.write_bytes(b"".join(whole.splitlines(keepends=True)[:2])[:-1])
        regenerate(arguments(workspace))
        assert path.read_bytes() == whole

    def test_a_disk_that_takes_a_part_of_a_line_gets_the_rest(self, tmp_path):
        with JsonlAppender(tmp_path / "a.jsonl") as file:
            file.write({"a": 1})
            real = file._file
            file._file = type("Slow", (), {"write": lambda _, data: real.write(data[:3])})()
            file.write({"b": "long enough"})
            file._file = real
        assert read_jsonl(tmp_path / "a.jsonl") == [{"a": 1}, {"b": "long enough"}]

    @pytest.mark.parametrize(
        "content", ['{"turns": ["abc"]}\n{"turns": ["de"]}', "notes", "[1]\n", '{"answer_ids": [1]}']
    )
    def test_a_file_that_holds_no_answers_is_left_as_it_is(self, workspace, content):
        (workspace / "own.jsonl").write_text(content)
        with pytest.raises(ValueError, match="own.jsonl"):
            regenerate(arguments(workspace, output=str(workspace / "own.jsonl")))
        assert (workspace / "own.jsonl").read_text() == content
        assert not (workspace / "own.meta.json").exists()

    def test_a_folder_of_something_else_is_left_as_it_is(self, workspace):
        (workspace / "README.md").write_text("mine")
        with pytest.raises(ValueError, match=r"README.md.*choose another"):
            regenerate(arguments(workspace, output=str(workspace)))
        assert (workspace / "README.md").read_text() == "mine"

    def test_other_prompts_are_refused_and_more_are_not(self, workspace):
        regenerate(arguments(workspace, limit=1, max_turns=1))
        write_prompts(workspace, [*PROMPTS, {"text": "new"}])
        regenerate(arguments(workspace, limit=2, max_turns=1))
        for others in ([{"text": "other"}, *PROMPTS], PROMPTS[:2]):
            write_prompts(workspace, others)
            with pytest.raises(ValueError, match="answers other prompts: the first 5 of"):
                regenerate(arguments(workspace, limit=2, max_turns=1))

    def test_two_runs_do_not_write_to_one_file(self, workspace):
        with JsonlAppender(workspace / "answers.jsonl"), pytest.raises(ValueError, match="Another process"):
            regenerate(arguments(workspace))
        assert set(by_key(regenerate(arguments(workspace)))) == KEYS

    def test_other_settings_are_refused(self, workspace):
        regenerate(arguments(workspace, limit=1))
        server = {"server": "http://x/v1", "model": "m"}
        for other in ({"thinking": "off"}, {"top_p": 0.5}, {"max_turns": 1}, {"dtype": "bfloat16"}, server):
            with pytest.raises(ValueError, match="top_p|thinking|max_turns|served_model|dtype"):
                regenerate(arguments(workspace, limit=1, **other))

    def test_what_an_earlier_version_did_not_record_is_not_held_against_it(self, workspace):
        path = regenerate(arguments(workspace, limit=1))
        meta = path.with_suffix(".meta.json")
        recorded = json.loads(meta.read_text())
        meta.write_text(
            json.dumps({name: recorded[name] for name in recorded if name not in ("dtype", "target_revision")})
        )
        regenerate(arguments(workspace))
        assert json.loads(meta.read_text())["dtype"] == "float32"

    def test_batches_of_another_limit_keep_their_answers(self, workspace):
        before = by_key(regenerate(arguments(workspace, limit=2)))
        after = by_key(regenerate(arguments(workspace)))
        assert before.items() <= after.items()
        assert set(after) == KEYS


class TestCard:
    def test_a_folder_has_a_card_with_provenance(self, workspace):
        prompts = [*PROMPTS[:3], {"text": "q", "license": "CC-BY-4.0"}]
        write_prompts(workspace, prompts)
        regenerate(arguments(workspace, output=str(workspace / "out"), thinking="on"))
        card = DatasetCard.load(workspace / "out" / "README.md")
        assert card.data.license is None
        assert "dspark" in card.data.tags
        text = card.text
        assert chat_template_hash(tokenizer_of(workspace)) in text
        for row in (
            "| thinking | `on` |",
            "| temperatures | [0.0, 0.8] |",
            "| dtype | `float32` |",
            "| conversations | 4 |",
            "| answers | 6 |",
        ):
            assert row in text
        for row in ("| skipped long prompts | 0 |", "| unfinished conversations | 0 |"):
            assert row in text
        for row in ("| one | 2 |", "| two | 1 |", "| not stated | 1 |", "| MIT | 3 |", "| CC-BY-4.0 | 1 |"):
            assert row in text
        assert str(workspace / "prompts.jsonl") in text
        from datasets import load_dataset, load_from_disk

        assert len(load_from_disk(str(workspace / "out" / "dataset"))) == 6
        assert load_dataset(str(workspace / "out"), split="train").num_rows == 6

    def test_a_target_of_the_hub_has_its_commit(self, workspace, monkeypatch):
        """In a cache as the Hub's client lays it out; the target's folder has none."""
        commit = "0123456789abcdef0123456789abcdef01234567"
        cached = workspace / "hub" / "models--org--target"
        shutil.copytree(workspace / "target", cached / "snapshots" / commit)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(commit)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workspace / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert target_revision("org/target") == commit
        assert target_revision(str(workspace / "target")) is None
        assert (
            settings_of(arguments(workspace, target="org/target"), tokenizer_of(workspace))["target_revision"]
            == commit
        )

    def test_a_licence_may_be_a_list(self, workspace):
        write_prompts(workspace, [{"text": "abc", "license": ["MIT", "Apache-2.0"], "source": 3}])
        regenerate(arguments(workspace, output=str(workspace / "out")))
        assert "MIT" in (workspace / "out" / "README.md").read_text()

    def test_one_licence_is_the_cards(self, workspace):
        regenerate(arguments(workspace, output=str(workspace / "out"), limit=2))
        assert DatasetCard.load(workspace / "out" / "README.md").data.license == "mit"


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_retries": -1}, "max_retries"),
        ({"top_p": 0.0}, "top_p"),
        ({"timeout": 0.0}, "timeout"),
        ({"server": "localhost:8000"}, "server"),
        ({"model": "m"}, "model"),
    ],
)
def test_wrong_arguments(workspace, wrong, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        arguments(workspace, **wrong)


def test_wrong_thinking(workspace):
    with pytest.raises(ValueError, match="`thinking`"):
        regenerate(arguments(workspace, thinking="yes"))
    tokenizer = tokenizer_of(workspace)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(workspace / "target")
    with pytest.raises(ValueError, match="does not know `enable_thinking`"):
        regenerate(arguments(workspace, thinking="off"))


def test_the_seed_of_a_batch_is_not_another_ones():
    assert len({batch_seed(seed, batch) for seed in range(3) for batch in range(1000)}) == 3000


def test_batches_are_sampled_alike(workspace):
    requests, _ = plan_requests(arguments(workspace, samples_per_prompt=3), tokenizer_of(workspace))
    batches = plan_batches(requests, 3, 0)
    assert sorted(r.key for batch in batches for r in batch) == sorted(r.key for r in requests)
    for batch in batches:
        assert len({(r.temperature, r.top_p, r.max_new_tokens) for r in batch}) == 1
        assert len(batch) == 1 or all(r.seed is None for r in batch)
