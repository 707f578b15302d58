"""The README's picture: its numbers are those of the report."""

import json

import pytest

from benchmarks import picture
from benchmarks.lib.options import RESULTS


pytest.importorskip("matplotlib")


@pytest.fixture
def report():
    return json.loads((RESULTS / "latency.json").read_text())


@pytest.mark.parametrize("threads", [1, 2])
def test_bars_and_labels_are_the_numbers_of_the_report(report, threads):
    section = picture.section_of(report, threads)
    assert section["threads"] == threads
    axes = picture.draw(report, section).axes[0]
    plain, assisted = axes.containers
    entries = list(section["sets"].values())
    for bars, method in ((plain, "plain"), (assisted, "assisted")):
        assert [bar.get_width() for bar in bars] == [entry["tokens_per_second"][method] for entry in entries]
    # A pair of bars stands at the tick of its set.
    for index, pair in enumerate(zip(plain, assisted, strict=True)):
        assert sum(bar.get_y() + bar.get_height() / 2 for bar in pair) / 2 == pytest.approx(index)
    assert [label.get_text() for label in axes.get_yticklabels()] == list(section["sets"])
    labels = {text.get_text() for text in axes.texts}
    for entry in entries:
        speeds = entry["tokens_per_second"]
        assert {f"{speeds['plain']:.1f}", f"{speeds['assisted']:.1f}   {entry['ratio']['assisted']:.2f}x"} <= labels
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens per second", "evaluation set")


def test_the_caption_names_the_conditions(report):
    text = picture.caption(report, picture.section_of(report, 1))
    facts = report["environment"]
    for part in (facts["cpu"], "1 thread of", facts["dtype"], "greedy, batch size 1", facts["git_commit"][:9]):
        assert part in text
    assert "busy" not in text
    assert "busy" in picture.caption(report | {"load": {"busy": True}}, picture.section_of(report, 2))


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_same_report_gives_the_same_transparent_file(suffix, tmp_path):
    paths = [tmp_path / "new" / f"{name}.{suffix}" for name in "ab"]
    for path in paths:
        assert picture.main(["--output", str(path)]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    if suffix == "png":
        from matplotlib.image import imread

        assert imread(paths[0])[0, 0, 3] == 0


def test_what_cannot_be_drawn_is_named(tmp_path, capsys):
    assert picture.main(["--threads", "3", "--output", str(tmp_path / "a.svg")]) == 2
    assert "the report has measurements for [1, 2] threads" in capsys.readouterr().err
    assert picture.main(["--output", str(tmp_path / "a.gif")]) == 2
    assert "must end in .svg or .png" in capsys.readouterr().err
