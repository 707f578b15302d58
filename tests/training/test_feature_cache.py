"""The feature cache: what it holds, its bound, checksums, a full disk, and kills."""

import errno
import json
import multiprocessing
import os
import shutil
import time
from collections import namedtuple

import pytest
import torch
from safetensors import SafetensorError
from torch.testing import assert_close

from tests.builders import VOCAB, tiny_drafter, tiny_target
from training.common.files import checksum
from training.data import feature_cache, shards
from training.data.conversations import Conversation
from training.data.feature_cache import FeatureCache
from training.data.shards import ShardFolder, size_text


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def binding(target):
    return tiny_drafter(target, target_layer_ids=[0, 2]).bind(target)


def conversations(count=9):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 14, (count,), generator=generator).tolist()
    return [Conversation(tuple(torch.randint(4, VOCAB, (n,), generator=generator).tolist()), 2) for n in lengths]


def cache_of(folder, data=None, **fields):
    options = {"target_name": "t", "target_layer_ids": [0, 2], "hidden_size": 32, "shard_size": 4}
    return FeatureCache(folder, conversations() if data is None else data, **(options | fields))


def index_of(folder):
    return json.loads((folder / "index.json").read_text())["shards"]


def content_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_it_holds_the_targets_features(tmp_path, target, binding):
    cache = cache_of(tmp_path)
    cache.build(target, binding, limit_gb=1)
    for index, conversation in enumerate(cache.conversations):
        with torch.no_grad():
            outputs = target(torch.tensor([conversation.input_ids]), output_hidden_states=True)
        hidden, loaded = outputs.hidden_states, cache.load(index)
        assert_close(loaded.features.float(), torch.cat([hidden[1], hidden[3]], -1)[0], atol=0.02, rtol=0.02)  # bf16
        assert_close(loaded.last_hidden.float(), hidden[-1][0], atol=0.02, rtol=0.02)
        expected = outputs.logits[0, conversation.response_start :].logsumexp(-1)
        assert_close(loaded.logsumexp[conversation.response_start :], expected, atol=1e-4, rtol=1e-4)


def test_the_index_is_that_of_the_files(tmp_path, target, binding):
    cache_of(tmp_path).build(target, binding, limit_gb=1)
    paths = {path.stem: path for path in tmp_path.glob("*.safetensors")}
    entries = index_of(tmp_path)
    assert set(entries) == set(paths)
    assert sorted(entry["conversations"] for entry in entries.values()) == [1, 4, 4]
    for name, path in paths.items():
        assert (entries[name]["sha256"], entries[name]["bytes"]) == (checksum(path), path.stat().st_size)
    assert {path.name for path in tmp_path.iterdir()} == {"index.json", *(path.name for path in paths.values())}


def test_more_data_adds_shards_and_other_data_has_its_own(tmp_path, target, binding):
    cache_of(tmp_path).build(target, binding, limit_gb=1)
    before = content_of(tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    cache_of(tmp_path, [*conversations()[:8], *conversations(3)]).build(target, binding, limit_gb=1)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert len(index_of(tmp_path)) == 4
    ids = conversations(1)[0].input_ids
    different = [
        cache_of(tmp_path, target_layer_ids=[1, 2]),
        cache_of(tmp_path, target_name="u"),
        cache_of(tmp_path, [Conversation(ids, 3)]),
        cache_of(tmp_path, [Conversation(ids, 2, response_spans=((2, 4),))]),
        cache_of(tmp_path, [Conversation(ids, 2)]),
    ]
    names = [f"{cache._name(0)}.safetensors" for cache in different]
    assert len({*names, *before}) == len(names) + len(before)


def test_the_size_is_predicted_and_said_before_anything_is_written(tmp_path, target, binding, caplog, monkeypatch):
    folder = tmp_path / "features"
    cache = cache_of(folder)
    monkeypatch.setattr(feature_cache, "compute_features", lambda *args, **kwargs: pytest.fail("computed"))
    with pytest.raises(pytest.fail.Exception):
        cache.build(target, binding, limit_gb=1)
    assert not folder.exists()
    assert f"{size_text(cache.num_bytes)}, of which {size_text(cache.num_bytes)} are missing" in caplog.text
    monkeypatch.undo()
    cache.build(target, binding, limit_gb=1)
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert cache.num_bytes - 512 * 3 < written <= cache.num_bytes
    caplog.clear()
    cache_of(folder).build(target, binding, limit_gb=1)
    assert "of which 0 kB are missing" in caplog.text


def test_the_folder_is_bounded(tmp_path, target, binding):
    folder = tmp_path / "features"
    with pytest.raises(ValueError, match="feature_cache_gb=1e-09"):
        cache_of(folder).build(target, binding, limit_gb=1e-9)
    assert not folder.exists()
    cache = cache_of(folder)
    limit = 1.5 * cache.num_bytes / 1e9
    cache.build(target, binding, limit_gb=limit)
    cache.build(target, binding, limit_gb=limit)
    with pytest.raises(ValueError, match=r"beside .* of other features in .*delete the other features"):
        cache_of(folder, target_name="u").build(target, binding, limit_gb=limit)


def test_sizes_in_words():
    assert [size_text(n) for n in (0, 1500, 2_340_000, 38e12)] == ["0 kB", "1.5 kB", "2.34 MB", "3.8e+04 GB"]


class TestDamage:
    def test_another_content_is_found_when_it_is_read(self, tmp_path, target, binding):
        cache_of(tmp_path).build(target, binding, limit_gb=1)
        path = tmp_path / f"{cache_of(tmp_path)._name(0)}.safetensors"
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        cache = cache_of(tmp_path)
        cache.build(target, binding, limit_gb=1)  # has the right length
        with pytest.raises(ValueError, match=f"{path.name}.*checksum.*delete it and start again"):
            cache.load(0)
        cache.load(5)
        before = cache.shards.index()
        path.unlink()
        cache.build(target, binding, limit_gb=1)
        assert cache.load(0).features.shape[0] == len(cache.conversations[0].input_ids)
        assert cache.shards.index() == before

    def test_a_shard_is_verified_once(self, tmp_path, target, binding, monkeypatch):
        cache = cache_of(tmp_path)
        cache.build(target, binding, limit_gb=1)
        calls = []
        monkeypatch.setattr(shards, "checksum", lambda path: calls.append(path) or checksum(path))
        for index in (0, 1, 5, 0, 6):
            cache.load(index)
        assert len(calls) == 2

    def test_a_short_file_is_written_again(self, tmp_path, target, binding, caplog):
        cache_of(tmp_path).build(target, binding, limit_gb=1)
        whole = content_of(tmp_path)
        for without_index in (False, True):
            path = next(tmp_path.glob("*.safetensors"))
            path.write_bytes(path.read_bytes()[:-7])
            if without_index:
                (tmp_path / "index.json").unlink()
            caplog.clear()
            cache_of(tmp_path).build(target, binding, limit_gb=1)
            assert "written again" in caplog.text
            assert {name: content_of(tmp_path)[name] for name in whole if name != "index.json"} == {
                name: content for name, content in whole.items() if name != "index.json"
            }

    def test_shards_without_an_index_count_as_there(self, tmp_path, target, binding):
        """Those of earlier versions, and the last one of a run killed before it could enter it."""
        cache_of(tmp_path).build(target, binding, limit_gb=1)
        entries = index_of(tmp_path)
        stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
        (tmp_path / "index.json").unlink()
        cache_of(tmp_path).build(target, binding, limit_gb=1)
        assert index_of(tmp_path) == entries
        assert {path: path.stat().st_mtime_ns for path in stamps} == stamps

    def test_a_shard_that_is_not_there(self, tmp_path, target, binding):
        with pytest.raises(ValueError, match="No such file.*start again"):
            cache_of(tmp_path).load(0)


class TestFullDisk:
    def test_it_is_seen_before_anything_is_computed(self, tmp_path, target, binding, monkeypatch):
        """What counts is what is missing: a cache that is complete needs no space."""
        usage = namedtuple("usage", "free")
        cache = cache_of(tmp_path / "features")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(cache.num_bytes - 1))
        match = rf"too full.*{size_text(cache.num_bytes)} are needed, .* are free.*continues from here"
        with pytest.raises(ValueError, match=match):
            cache.build(target, binding, limit_gb=1)
        assert list(tmp_path.iterdir()) == []
        monkeypatch.undo()
        cache.build(target, binding, limit_gb=1)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0))
        cache.build(target, binding, limit_gb=1)

    @pytest.mark.parametrize(
        "error",
        [
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        ],
        ids=["OSError", "SafetensorError"],
    )
    def test_a_disk_that_fills_up_meanwhile(self, tmp_path, target, binding, monkeypatch, error):
        whole = tmp_path / "whole"
        cache_of(whole).build(target, binding, limit_gb=1)
        real, calls = shards.save_file, []

        def fills_up(tensors, path):
            real(tensors, path)
            calls.append(path)
            if len(calls) == 2:
                raise error

        cache = cache_of(tmp_path / "features")
        monkeypatch.setattr(shards, "save_file", fills_up)
        with pytest.raises(ValueError, match=rf"disk of `{tmp_path}/features` is too full") as caught:
            cache.build(target, binding, limit_gb=1)
        remaining = cache.num_bytes - cache._shard_bytes(0)
        assert f"{size_text(remaining)} are needed" in str(caught.value)
        assert len(list((tmp_path / "features").iterdir())) == 2  # a shard and the index, nothing partial
        monkeypatch.undo()
        cache.build(target, binding, limit_gb=1)
        assert content_of(tmp_path / "features") == content_of(whole)

    def test_other_errors_are_themselves(self, tmp_path, monkeypatch):
        def fails(tensors, path):
            raise PermissionError("no")

        monkeypatch.setattr(shards, "save_file", fails)
        with pytest.raises(PermissionError):
            ShardFolder(tmp_path).write("a", {}, num_conversations=1, needed=1)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("shard", [0, 1, 2])
def test_kill_9_and_resume(tmp_path, target, binding, monkeypatch, shard):
    """Killed while a shard is half written, the next run removes the rest of it and ends with the same files."""
    whole, folder = tmp_path / "whole", tmp_path / "features"
    cache_of(whole).build(target, binding, limit_gb=1)
    real = shards.save_file

    def stops_halfway(tensors, path):
        if len(list(folder.glob("*.safetensors"))) == shard:
            path.write_bytes(b"half")
            time.sleep(60)
        real(tensors, path)

    monkeypatch.setattr(shards, "save_file", stops_halfway)
    run = multiprocessing.get_context("fork").Process(
        target=cache_of(folder).build, args=(target, binding), kwargs={"limit_gb": 1}
    )
    run.start()
    while not list(folder.glob(".partial*/*")):
        assert run.is_alive()
        time.sleep(0.01)
    run.kill()
    run.join()
    monkeypatch.undo()
    assert list(folder.glob(".partial*"))
    cache_of(folder).build(target, binding, limit_gb=1)
    assert content_of(folder) == content_of(whole)
    assert not list(folder.glob(".partial*"))
