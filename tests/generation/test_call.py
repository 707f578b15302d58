"""The `generate` call: settings, hostile input, other assistants, streamers, pipelines, caches, and what stays as it was."""

import copy
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation import utils as generation_utils
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from modeling_dspark import DSparkConfig, DSparkModel, install_dispatcher, remove_dispatcher
from modeling_dspark.compat_transformers import cache_keyword, loop_takes_embeddings
from modeling_dspark.fused_backends import backend_for
from modeling_dspark.schedule_settings import resolve_settings
from modeling_dspark.target_binding import tapped_features
from tests.builders import cache_with_kernels, script, tiny_drafter, tiny_target
from tests.generation.test_greedy_equality import PROMPT, assisted, check, plain, scripted


def config(**fields):
    defaults = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "target_layer_ids": [0],
        "markov_rank": 4,
    }
    return DSparkConfig(**(defaults | {"num_target_layers": 4, "mask_token_id": 3} | fields))


class TestSettings:
    """The trap of design section 3: Transformers' global defaults cannot be told from "not set"."""

    def test_global_defaults_count_as_not_set(self):
        generation = GenerationConfig(
            num_assistant_tokens=20, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.4
        )
        settings = resolve_settings(generation, config(block_size=7))
        assert (settings.num_assistant_tokens, settings.schedule) == (7, "throughput")

    def test_defaults_of_the_drafter(self):
        drafter = config(
            block_size=7,
            default_num_assistant_tokens=3,
            default_num_assistant_tokens_schedule="confidence",
            default_assistant_confidence_threshold=0.7,
        )
        settings = resolve_settings(GenerationConfig(), drafter)
        assert (settings.num_assistant_tokens, settings.schedule, settings.confidence_threshold) == (
            3,
            "confidence",
            0.7,
        )

    def test_the_call_wins(self):
        drafter = config(default_num_assistant_tokens=3, default_num_assistant_tokens_schedule="confidence")
        generation = GenerationConfig(num_assistant_tokens=2, num_assistant_tokens_schedule="fixed")
        settings = resolve_settings(generation, drafter)
        assert (settings.num_assistant_tokens, settings.schedule) == (2, "fixed")

    def test_a_threshold_alone_means_confidence(self):
        settings = resolve_settings(GenerationConfig(assistant_confidence_threshold=0.3), config())
        assert (settings.schedule, settings.confidence_threshold) == ("confidence", 0.3)

    def test_the_cap_is_at_most_the_block(self):
        assert (
            resolve_settings(GenerationConfig(num_assistant_tokens=19), config(block_size=5)).num_assistant_tokens == 5
        )

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"assistant_confidence_threshold": 2.0}, "assistant_confidence_threshold.*2.0"),
            ({"assistant_confidence_threshold": -0.1}, "assistant_confidence_threshold.*-0.1"),
            ({"num_assistant_tokens": -1}, "num_assistant_tokens.*-1"),
            ({"num_assistant_tokens_schedule": "heuristic"}, "num_assistant_tokens_schedule.*heuristic.*fixed"),
        ],
    )
    def test_wrong_values_are_named(self, wrong, message):
        target = tiny_target("llama")
        with pytest.raises(ValueError, match=message):
            assisted(target, tiny_drafter(target), PROMPT, max_new_tokens=3, **wrong)

    def test_confidence_needs_the_head(self):
        target = tiny_target("llama")
        drafter = tiny_drafter(target, enable_confidence_head=False)
        with pytest.raises(ValueError, match="confidence head"):
            assisted(target, drafter, PROMPT, max_new_tokens=3, assistant_confidence_threshold=0.2)

    def test_settings_take_effect(self):
        target = tiny_target("llama")
        drafter = scripted(target, wrong_every=1000)
        assert set(check(target, drafter, max_new_tokens=13, settings={"num_assistant_tokens": 2}).verified) <= {
            0,
            1,
            2,
        }
        run = check(target, drafter, max_new_tokens=13, settings={"assistant_confidence_threshold": 1.0})
        assert sum(run.verified) == 0
        run = check(target, drafter, max_new_tokens=13, settings={"assistant_confidence_threshold": 0.0})
        assert sum(run.verified) > 0

    def test_temperatures_of_the_confidence(self):
        """Calibration changes which positions pass a threshold: a huge temperature brings every confidence to one half."""
        target = tiny_target("llama")
        drafter = tiny_drafter(target, confidence_temperatures=[1e6] * 4)
        assert (
            sum(check(target, drafter, max_new_tokens=13, settings={"assistant_confidence_threshold": 0.51}).verified)
            == 0
        )
        run = check(target, drafter, max_new_tokens=13, settings={"assistant_confidence_threshold": 0.49})
        assert run.verified[0] == 4


class TestHostileInput:
    """User mistakes: a clear error, and nothing of the user's changed."""

    def refused(self, message, target, drafter, prompt=PROMPT, **kwargs):
        before = (target.generation_config.to_dict(), target.config.to_dict(), drafter.config.to_dict())
        with pytest.raises(ValueError, match=message):
            target.generate(torch.tensor(prompt), assistant_model=drafter, **({"max_new_tokens": 4} | kwargs))
        assert before == (target.generation_config.to_dict(), target.config.to_dict(), drafter.config.to_dict())

    def test_batches(self):
        target = tiny_target("llama")
        cache = {cache_keyword(): DynamicCache(config=target.config)}
        self.refused("batch of 3.*its own cache.*each prompt", target, tiny_drafter(target), PROMPT * 3, **cache)

    def test_beams(self):
        target = tiny_target("llama")
        self.refused("num_beams=2", target, tiny_drafter(target), num_beams=2)

    def test_several_sequences(self):
        target = tiny_target("llama")
        self.refused("num_return_sequences", target, tiny_drafter(target), num_return_sequences=2, do_sample=True)

    def test_empty_prompts(self):
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        with pytest.raises(ValueError, match="prompt is empty"):
            target.generate(torch.zeros(1, 0, dtype=torch.long), assistant_model=drafter, max_new_tokens=4)

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"hidden_size": 64, "head_dim": 16}, "hidden_size.*64.*32"),
            ({"vocab_size": 100}, "vocab_size.*100.*61"),
            ({"num_hidden_layers": 5}, "num_hidden_layers.*5.*4"),
        ],
    )
    def test_a_drafter_for_another_target(self, overrides, message):
        other = tiny_target("llama", **overrides)
        self.refused(message, other, tiny_drafter(tiny_target("llama")))

    def test_encoder_decoder_targets(self):
        from transformers import T5Config, T5ForConditionalGeneration

        target = T5ForConditionalGeneration(
            T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0)
        )
        with pytest.raises(ValueError, match="decoder-only"):
            target.generate(torch.tensor(PROMPT), assistant_model=tiny_drafter(tiny_target("llama")), max_new_tokens=3)

    @pytest.mark.parametrize("field", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}])
    def test_two_kinds_of_drafts(self, field):
        target = tiny_target("llama")
        self.refused(next(iter(field)), target, tiny_drafter(target), **field)

    @pytest.mark.parametrize(
        "state",
        [
            {"guidance_scale": 1.5},
            {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2], context_history_size=4)},
        ],
        ids=["guidance", "synthid"],
    )
    def test_processors_that_keep_a_state(self, state):
        target = tiny_target("llama")
        with pytest.raises(ValueError, match="keeps a state"):
            assisted(target, tiny_drafter(target), PROMPT, max_new_tokens=4, **state)

    def test_no_cache(self):
        target = tiny_target("llama")
        with pytest.raises(ValueError, match="use_cache"):
            assisted(target, tiny_drafter(target), PROMPT, max_new_tokens=4, use_cache=False)

    def test_hidden_states_of_another_shape(self):
        with pytest.raises(ValueError, match="hidden states have shape"):
            tapped_features([torch.zeros(2, 1, 3, 4)], [-1])

    def test_a_later_call_works(self):
        target = tiny_target("llama")
        drafter = scripted(target)
        self.refused("num_beams=2", target, drafter, num_beams=2)
        check(target, drafter, max_new_tokens=10)


class TestNothingIsChanged:
    def test_configs_and_attention_implementation(self):
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        generation = GenerationConfig(max_new_tokens=9, assistant_confidence_threshold=0.3, do_sample=False)
        before = [
            copy.deepcopy(x.to_dict()) for x in (generation, target.generation_config, target.config, drafter.config)
        ]
        implementation = target.config._attn_implementation
        target.generate(torch.tensor(PROMPT), generation_config=generation, assistant_model=drafter)
        after = [x.to_dict() for x in (generation, target.generation_config, target.config, drafter.config)]
        assert before == after
        assert target.config._attn_implementation == implementation
        assert (
            target.generate(torch.tensor(PROMPT), max_new_tokens=2, return_dict_in_generate=True).hidden_states is None
        )

    def test_an_error_in_the_middle_leaves_a_working_target(self):
        class Fails(BaseStreamer):
            calls = 0

            def put(self, value):
                self.calls += 1
                if self.calls == 3:
                    raise KeyboardInterrupt

            def end(self):
                pass

        target = tiny_target("llama")
        drafter = scripted(target)
        with pytest.raises(KeyboardInterrupt):
            assisted(target, drafter, PROMPT, max_new_tokens=20, streamer=Fails())
        check(target, drafter, max_new_tokens=20)


class TestDispatcher:
    def test_other_assistants_are_untouched(self):
        target, small = tiny_target("llama"), tiny_target("llama", seed=5, num_hidden_layers=2)
        tiny_drafter(target)
        expected = plain(target, PROMPT, max_new_tokens=15, eos_token_id=None)
        assert assisted(target, small, PROMPT, max_new_tokens=15, eos_token_id=None).tolist() == expected.tolist()
        lookup = plain(target, PROMPT, max_new_tokens=15, eos_token_id=None, prompt_lookup_num_tokens=3)
        assert lookup.tolist() == expected.tolist()

    def test_a_sampled_plain_assistant_draws_the_same_numbers(self):
        """With and without the dispatcher a plain assistant samples the very same text."""
        target, small = tiny_target("llama"), tiny_target("llama", seed=5, num_hidden_layers=2)
        texts = []
        for switch in (install_dispatcher, remove_dispatcher):
            switch()
            torch.manual_seed(7)
            kwargs = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None}
            texts.append(target.generate(torch.tensor(PROMPT), assistant_model=small, **kwargs).tolist())
        install_dispatcher()
        assert texts[0] == texts[1]

    def test_install_is_idempotent_and_removable(self):
        install_dispatcher()
        names = ("_assisted_decoding", "_get_candidate_generator", "_validate_generation_mode")
        first = [getattr(GenerationMixin, name) for name in names]
        install_dispatcher()
        assert [getattr(GenerationMixin, name) for name in names] == first
        remove_dispatcher()
        assert not any(hasattr(getattr(GenerationMixin, name), "_dspark_original") for name in names)
        assert not hasattr(generation_utils._speculative_sampling, "_dspark_original")
        install_dispatcher()
        assert all(hasattr(getattr(GenerationMixin, name), "_dspark_original") for name in names)

    def test_an_unknown_transformers_is_refused(self, monkeypatch):
        remove_dispatcher()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(GenerationMixin, "_get_candidate_generator", lambda self, other: None)
                with pytest.raises(RuntimeError, match=r"5\.17 to 5\.24"):
                    install_dispatcher()
        finally:
            install_dispatcher()


class _LongEnough(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class TestHostileBatches:
    """What a careless caller passes: plain `generate`'s text, or an error that names the way out."""

    NEW = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}

    def both(self, inputs, *, rows=None, **kwargs):
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        kwargs = self.NEW | kwargs
        expected = target.generate(**inputs, **kwargs)
        return target.generate(**inputs, assistant_model=drafter, **kwargs), expected

    @pytest.mark.parametrize("mask", [[1, 1, 0, 1, 1, 1], [0, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]], ids=str)
    @pytest.mark.parametrize(
        "processors",
        [{}, {"repetition_penalty": 1.8}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[13, 17]]}],
        ids=str,
    )
    @pytest.mark.parametrize("rows", [1, 3])
    def test_masks_with_holes(self, mask, processors, rows):
        inputs = {"input_ids": torch.tensor(PROMPT * rows), "attention_mask": torch.tensor([mask] * rows)}
        ours, expected = self.both(inputs, **processors)
        assert torch.equal(ours, expected)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_token_ids_of_either_width(self, dtype):
        ours, expected = self.both({"input_ids": torch.tensor(PROMPT * 2, dtype=dtype)})
        assert ours.dtype == expected.dtype
        assert torch.equal(ours, expected)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
    def test_masks_of_any_dtype(self, dtype):
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]).to(dtype)
        ours, expected = self.both({"input_ids": torch.tensor(PROMPT * 2), "attention_mask": mask})
        assert torch.equal(ours, expected)

    def test_masks_that_number_segments_do_not_pass_unnoticed(self):
        """Plain `generate` makes positions 1, 3, 5, ... of a mask of twos."""
        inputs = {"input_ids": torch.tensor(PROMPT), "attention_mask": torch.full((1, len(PROMPT[0])), 2)}
        ours, expected = self.both(inputs)
        assert torch.equal(ours, expected)

    def test_a_padding_token_beyond_the_vocabulary(self):
        target = tiny_target("llama")
        kwargs = self.NEW | {"pad_token_id": 61, "output_scores": True, "return_dict_in_generate": True}
        ours = target.generate(torch.tensor(PROMPT), assistant_model=tiny_drafter(target), **kwargs)
        expected = target.generate(torch.tensor(PROMPT), **kwargs)
        assert torch.equal(ours.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(ours.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)

    def test_an_empty_batch(self):
        target = tiny_target("llama")
        with pytest.raises(ValueError, match=r"batch is empty.*\[0, 4\]"):
            target.generate(torch.zeros(0, 4, dtype=torch.long), assistant_model=tiny_drafter(target), **self.NEW)

    @pytest.mark.parametrize("way", ["assistant_model", "custom_generate"])
    def test_several_sequences_of_a_prompt(self, way):
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        door = {"assistant_model": drafter} if way == "assistant_model" else {"custom_generate": drafter.decode}
        kwargs = self.NEW | {"do_sample": True, "num_return_sequences": 2}
        with pytest.raises(ValueError, match="num_return_sequences"):
            target.generate(torch.tensor(PROMPT), **door, **kwargs)

    def test_a_longest_length_that_the_prompt_has_already(self):
        """Plain `generate` looks at criteria after a token, so there is one."""
        criteria = StoppingCriteriaList([MaxLengthCriteria(3)])
        for prompt in (PROMPT[0], PROMPT[0] * 9):  # the long one is longer than any block beyond it
            ours, expected = self.both({"input_ids": torch.tensor([prompt] * 2)}, stopping_criteria=criteria)
            assert torch.equal(ours, expected)

    def test_subclasses_of_criteria_are_asked(self):
        class Patient(EosTokenCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                return super().__call__(input_ids, scores) & (input_ids.shape[1] > len(PROMPT[0]) + 6)

        target = tiny_target("llama")
        text = plain(target, PROMPT, max_new_tokens=10, eos_token_id=None)[0].tolist()
        for token in (text[7], text[14]):
            criteria = StoppingCriteriaList([Patient(token)])
            ours, expected = self.both({"input_ids": torch.tensor(PROMPT)}, stopping_criteria=criteria)
            assert torch.equal(ours, expected)

    def test_criteria_that_answer_for_the_whole_batch(self):
        class Never(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                return torch.tensor([input_ids.shape[1] >= len(PROMPT[0]) + 4])

        ours, expected = self.both(
            {"input_ids": torch.tensor(PROMPT * 2)}, stopping_criteria=StoppingCriteriaList([Never()])
        )
        assert torch.equal(ours, expected)

    def test_a_target_in_training_mode(self):
        """Without dropout it decodes as ever; with it no text is the same twice, and a batch is told so."""
        target = tiny_target("llama").train()
        expected = target.generate(torch.tensor(PROMPT * 2), **self.NEW)
        ours = target.generate(torch.tensor(PROMPT * 2), assistant_model=tiny_drafter(target), **self.NEW)
        assert torch.equal(ours, expected)
        target = tiny_target("gpt2").train()
        with pytest.raises(ValueError, match=r"dropout.*target\.eval\(\)"):
            target.generate(torch.tensor(PROMPT * 2), assistant_model=tiny_drafter(target), **self.NEW)
        assert target.training

    @pytest.mark.parametrize("others", ["assisted", "plain"])
    def test_threads_leave_the_target_as_it_was(self, others):
        """Texts are right, and a plain call beside an assisted one is right too or says what is the matter."""
        from concurrent.futures import ThreadPoolExecutor

        target = tiny_target("llama")
        drafters = [tiny_drafter(target) for _ in range(4)]
        expected, told = target.generate(torch.tensor(PROMPT), **self.NEW), []

        def call(number):
            door = {"assistant_model": drafters[number % 4], "num_assistant_tokens_schedule": "fixed"}
            try:
                return target.generate(
                    torch.tensor(PROMPT), **self.NEW, **(door if number % 2 or others == "assisted" else {})
                )
            except RuntimeError as error:
                told.append(str(error))
                return expected

        with ThreadPoolExecutor(4) as pool:
            for text in pool.map(call, range(24)):
                assert torch.equal(text, expected)
        assert all("another thread" in error for error in told)
        assert others == "plain" or not told
        assert target.config._attn_implementation == "sdpa"
        assert torch.equal(target.generate(torch.tensor(PROMPT), **self.NEW), expected)


class TestStreaming:
    class Keeps(BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.view(-1).tolist()

        def end(self):
            self.ended = True

    def test_the_streamer_ends_where_the_text_ends(self):
        target = tiny_target("llama")
        text = plain(target, PROMPT, max_new_tokens=30, eos_token_id=None)[0].tolist()
        for eos in (None, text[12], text[17]):
            streamer = self.Keeps()
            output = assisted(target, scripted(target), PROMPT, max_new_tokens=30, eos_token_id=eos, streamer=streamer)
            assert streamer.tokens == output[0].tolist()
            assert streamer.ended

    @pytest.mark.parametrize("kind", ["stop string", "criterion"])
    def test_the_streamer_ends_where_other_conditions_end_the_text(self, kind, tiny_tokenizer):
        """In the middle of an accepted block: nothing behind it is streamed."""
        target = tiny_target("llama")
        text = plain(target, PROMPT, max_new_tokens=30, eos_token_id=None)[0].tolist()
        for length in range(8, 14):
            streamer = self.Keeps()
            if kind == "criterion":
                stop = {"stopping_criteria": StoppingCriteriaList([_LongEnough(length)])}
            else:
                stop = {"stop_strings": tiny_tokenizer.decode(text[length - 2 : length]), "tokenizer": tiny_tokenizer}
            kwargs = {"max_new_tokens": 30, "eos_token_id": None} | stop
            expected = plain(target, PROMPT, **kwargs)[0].tolist()
            output = assisted(target, scripted(target), PROMPT, streamer=streamer, **kwargs)[0].tolist()
            assert output == streamer.tokens == expected
            assert len(expected) <= length
            assert streamer.ended

    def test_text_streamers(self, tiny_tokenizer, capsys):
        from threading import Thread

        target = tiny_target("llama")
        drafter = scripted(target)
        expected = tiny_tokenizer.decode(plain(target, PROMPT, max_new_tokens=20, eos_token_id=None)[0, 6:])
        streamer = TextStreamer(tiny_tokenizer, skip_prompt=True)
        assisted(target, drafter, PROMPT, max_new_tokens=20, eos_token_id=None, streamer=streamer)
        assert capsys.readouterr().out.strip() == expected.strip()
        iterator = TextIteratorStreamer(tiny_tokenizer, skip_prompt=True, timeout=30)
        kwargs = {"max_new_tokens": 20, "eos_token_id": None, "streamer": iterator}
        thread = Thread(target=assisted, args=(target, drafter, PROMPT), kwargs=kwargs)
        thread.start()
        assert "".join(iterator).strip() == expected.strip()
        thread.join()

    def test_stop_strings(self, tiny_tokenizer):
        target = tiny_target("llama")
        text = plain(target, PROMPT, max_new_tokens=30, eos_token_id=None)[0].tolist()
        for step in range(1, 9):
            stop = tiny_tokenizer.decode(text[6 + step : 7 + step]).strip()
            kwargs = {"max_new_tokens": 30, "eos_token_id": None, "stop_strings": [stop], "tokenizer": tiny_tokenizer}
            check(target, scripted(target, wrong_every=1000), **kwargs)


def test_pipeline(tiny_tokenizer):
    target = tiny_target("llama")
    drafter = scripted(target)
    text = tiny_tokenizer.decode(PROMPT[0])
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    expected = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer)(text, **kwargs)
    pipe = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer, assistant_model=drafter)
    drafter.last_run = None
    assert pipe(text, **kwargs) == expected
    assert drafter.last_run.rounds > 0


def test_pipeline_of_a_batch(tiny_tokenizer):
    target = tiny_target("llama")
    tiny_tokenizer.padding_side = "left"
    texts = ["abc", "Z", "hello", "the9quick", "no"]
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    expected = [pipeline("text-generation", model=target, tokenizer=tiny_tokenizer)(text, **kwargs) for text in texts]
    drafter = tiny_drafter(target)
    pipe = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer, assistant_model=drafter, batch_size=3)
    assert pipe(texts, **kwargs) == expected
    assert len(drafter.last_run.requests) == 2  # five texts in batches of three


class TestCriteria:
    """Criteria of the user's own, at the exact token."""

    def run(self, criterion, **kwargs):
        target = tiny_target("llama")
        criteria = {"stopping_criteria": StoppingCriteriaList([criterion])}
        wanted = {"max_new_tokens": 30, "eos_token_id": None, **kwargs}
        for wrong_every in (3, 1000):
            expected = plain(target, PROMPT, **criteria, **wanted)
            output = assisted(target, scripted(target, wrong_every=wrong_every), PROMPT, **criteria, **wanted)
            ours, theirs = (getattr(x, "sequences", x).tolist() for x in (output, expected))
            assert ours == theirs

    @pytest.mark.parametrize("length", [7, 8, 13, 16])
    def test_max_length_criteria(self, length):
        self.run(MaxLengthCriteria(length))

    def test_a_plain_bool(self):
        class Stops(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                return input_ids.shape[1] >= 13

        self.run(Stops())

    @pytest.mark.skipif(
        not loop_takes_embeddings(), reason="older Transformers ask criteria without scores themselves"
    )
    def test_scores(self):
        class Stops(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                return torch.tensor([len(scores) >= 7])

        self.run(Stops(), output_scores=True, return_dict_in_generate=True)


class TestCaches:
    @pytest.mark.parametrize("num_cached", [2, 5])
    def test_a_cache_with_a_prefix_of_the_prompt(self, num_cached):
        """The prefix is computed again: right text, drafts as good as without the cache, the user's cache untouched."""
        target = tiny_target("llama")
        keyword = cache_keyword()
        caches = [DynamicCache(config=target.config) for _ in range(2)]
        for cache in caches:
            target(torch.tensor(PROMPT)[:, :num_cached], **{keyword: cache}, use_cache=True)
        kwargs = {"max_new_tokens": 20, "eos_token_id": None}
        expected = plain(target, PROMPT, **{keyword: caches[0]}, **kwargs)
        drafter = scripted(target, wrong_every=1000)
        always = {"num_assistant_tokens_schedule": "fixed"}
        output = assisted(target, drafter, PROMPT, **{keyword: caches[1]}, **kwargs, **always)
        assert output.tolist() == expected.tolist()
        assert drafter.last_run.new_tokens == [5, 5, 5, 4]
        assert caches[1].get_seq_length() == num_cached

    def test_a_cache_with_other_tokens(self):
        target = tiny_target("llama")
        cache = DynamicCache(config=target.config)
        target(torch.tensor([[5] * 9]), **{cache_keyword(): cache}, use_cache=True)
        with pytest.raises(ValueError, match="not in `input_ids`"):
            assisted(target, tiny_drafter(target), PROMPT, max_new_tokens=4, **{cache_keyword(): cache})

    def test_dynamic_cache_of_the_user(self):
        target = tiny_target("gemma3")
        drafter = scripted(target)
        kwargs = {"max_new_tokens": 30, "eos_token_id": None}
        keyword = cache_keyword()
        expected = plain(target, PROMPT, **kwargs)
        output = assisted(target, drafter, PROMPT, **{keyword: DynamicCache(config=target.config)}, **kwargs)
        assert output.tolist() == expected.tolist()


def test_statistics():
    """Counts of a run whose outcome is known: all drafts right, block size 4, 21 tokens after the prefill's."""
    target = tiny_target("llama")
    run = check(target, scripted(target, wrong_every=1000), max_new_tokens=22, eos_token_id=None)
    assert run.new_tokens == [5, 5, 5, 5, 1]
    assert run.accepted == [4, 4, 4, 4, 0]
    assert run.verified_by_position == run.accepted_by_position == [4, 4, 4, 4]
    assert run.acceptance_rate_by_position == [1.0] * 4
    assert run.acceptance_length == 21 / 5
    copied = copy.deepcopy(run)
    copied.extend(run)
    assert copied.rounds == 2 * run.rounds


def test_zero_drafts_when_sampling():
    """No slice `[-0:]` is taken of empty drafts."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    kwargs = {"do_sample": True, "max_new_tokens": 8, "eos_token_id": None}
    for settings in ({"num_assistant_tokens": 0}, {"assistant_confidence_threshold": 1.0}):
        output = target.generate(torch.tensor(PROMPT), assistant_model=drafter, **kwargs, **settings)
        assert output.shape[1] == len(PROMPT[0]) + 8
        assert sum(drafter.last_run.verified) == 0


def test_seeds_repeat():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    texts = []
    for _ in range(2):
        torch.manual_seed(11)
        kwargs = {"do_sample": True, "max_new_tokens": 20, "eos_token_id": None}
        texts.append(target.generate(torch.tensor(PROMPT), assistant_model=drafter, **kwargs).tolist())
    assert texts[0] == texts[1]


def test_processors_that_leave_no_draftable_token():
    """A reduced vocabulary whose tokens are all banned: drafts are useless, the text is right."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_token_ids=[4, 5, 6])
    check(target, drafter, max_new_tokens=10, eos_token_id=None, suppress_tokens=[4, 5, 6])
    kwargs = {"do_sample": True, "max_new_tokens": 10, "eos_token_id": None, "suppress_tokens": [4, 5, 6]}
    output = target.generate(torch.tensor(PROMPT), assistant_model=drafter, **kwargs)
    assert not {4, 5, 6} & set(output[0, 6:].tolist())


@pytest.mark.parametrize(
    "warper", [{"eta_cutoff": 0.2}, {"epsilon_cutoff": 0.1}, {"typical_p": 0.5}, {"top_p": 0.5}], ids=str
)
def test_warpers_with_nothing_to_draft(warper):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_token_ids=[4, 5, 6])
    kwargs = {"do_sample": True, "max_new_tokens": 10, "eos_token_id": None, "suppress_tokens": [4, 5, 6]}
    output = target.generate(torch.tensor(PROMPT), assistant_model=drafter, **kwargs, **warper)
    assert not {4, 5, 6} & set(output[0, 6:].tolist())


def test_a_drafter_of_nan():
    """Useless drafts, right text."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    with torch.no_grad():
        drafter.fc.weight.fill_(torch.nan)
    check(target, drafter, max_new_tokens=10, eos_token_id=None)
    kwargs = {"do_sample": True, "max_new_tokens": 10, "eos_token_id": None, "top_k": 0}
    assert target.generate(torch.tensor(PROMPT), assistant_model=drafter, **kwargs).shape[1] == 16


def test_embeddings_in_place_of_tokens():
    target = tiny_target("llama")
    drafter = scripted(target, wrong_every=1000)
    embeds = target.get_input_embeddings()(torch.tensor(PROMPT)).detach()
    kwargs = {"inputs_embeds": embeds, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    if not loop_takes_embeddings():
        with pytest.raises(ValueError, match="inputs_embeds"):
            target.generate(**kwargs, assistant_model=drafter)
        return
    expected = target.generate(**kwargs)
    assert target.generate(**kwargs, assistant_model=drafter).tolist() == expected.tolist()
    assert sum(drafter.last_run.accepted) > 10


def test_targets_in_lower_precision():
    """bf16 and fp16 targets and drafters, mixed: it runs, and the text differs from plain only at near-ties."""
    for dtype in (torch.bfloat16, torch.float16):
        target = tiny_target("llama").to(dtype)
        for drafter in (tiny_drafter(target).to(dtype), tiny_drafter(target)):
            output = assisted(target, drafter, PROMPT, max_new_tokens=16, eos_token_id=None)
            text = output[0].tolist()
            logits = target(output).logits[0].float()
            for index in range(len(PROMPT[0]), len(text)):
                gap = logits[index - 1].max() - logits[index - 1, text[index]]
                assert gap < 0.25


def test_a_quantised_target_is_warned_about(caplog):
    """Its hidden states drift; the warning gives the accepted length that this call had."""
    target = tiny_target("llama")
    drafter = scripted(target, wrong_every=1000)
    target.is_quantized = True
    logging.get_logger("modeling_dspark.generate_call").warning_once.cache_clear()
    run = check(target, drafter, max_new_tokens=12, eos_token_id=None)
    assert f"{run.acceptance_length:.2f}" in caplog.text
    assert "quantised" in caplog.text


def test_two_copies_of_remote_code(tmp_path):
    """Two remote-code folders in one process, which never imported the package, both work and do not stack."""
    import json

    from hub_upload.package import package

    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    for name, seed in (("one", 1), ("two", 2)):
        drafter = tiny_drafter(target, seed=seed)
        drafter.save_pretrained(tmp_path / f"{name}-source")
        for path in (tmp_path / f"{name}-source").glob("*.py"):
            path.unlink()
        (tmp_path / f"{name}-source" / "README.md").write_text("card\n")
        package(tmp_path / f"{name}-source", tmp_path / name)
    snapshot = tmp_path / "hub" / "models--org--three" / "snapshots" / ("0" * 40)
    shutil.copytree(tmp_path / "two", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    code = """
import json, sys, torch
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin
target = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/target")
prompt = torch.tensor([[7, 11, 13, 17]])
call = {"max_new_tokens": 12, "do_sample": False, "num_assistant_tokens_schedule": "fixed"}  # measures no costs
texts = [target.generate(prompt, max_new_tokens=12, do_sample=False).tolist()]
for name in ("one", "two", "one"):
    drafter = AutoModel.from_pretrained(sys.argv[1] + "/" + name, trust_remote_code=True)
    texts.append(target.generate(prompt, assistant_model=drafter, **call).tolist())
    assert drafter.last_run.rounds > 0
    drafter.last_run = None
    door = {"custom_generate": sys.argv[1] + "/" + name, "trust_remote_code": True, "assistant_model": drafter}
    batch = target.generate(prompt.repeat(3, 1), **call, **door)
    assert len(drafter.last_run.requests) == 3
    texts += [[row] for row in batch.tolist()]
assert "modeling_dspark" not in sys.modules
original = GenerationMixin._assisted_decoding._dspark_original
assert not hasattr(original, "_dspark_original")
drafter.save_pretrained(sys.argv[1] + "/again")
for name in (sys.argv[1] + "/again", "org/three"):
    again = AutoModel.from_pretrained(name, trust_remote_code=True)
    texts.append(target.generate(prompt, assistant_model=again, **call).tolist())
    fused = sys.modules[type(again).__module__.rpartition(".")[0] + ".fused_backends"]
    assert [type(backend).__name__ for backend in fused._made.values()] == [sys.argv[2]]
print(json.dumps(texts))
"""
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    environment |= {"DSPARK_CACHE": str(cache_with_kernels(tmp_path / "cache")), "HF_HUB_CACHE": str(tmp_path / "hub")}
    backend = type(backend_for(torch.device("cpu"))).__name__  # `CpuBackend`, where there is a compiler
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), backend],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    texts = json.loads(result.stdout.splitlines()[-1])
    assert all(text == texts[0] for text in texts)


def test_local_class_needs_no_remote_code(tmp_path):
    from transformers import AutoModel

    target = tiny_target("llama")
    tiny_drafter(target).save_pretrained(tmp_path)
    drafter = AutoModel.from_pretrained(tmp_path)
    assert isinstance(drafter, DSparkModel)
    check(target, script(drafter, plain(target, PROMPT, max_new_tokens=20)[0].tolist()), max_new_tokens=12)
