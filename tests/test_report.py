"""The report: one page with all figures, that loads nothing and says what the records say."""

import html
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from sample_runs import failed_record, figures, record, write_run

from analysis import tables
from analysis.report import load_sources, plot
from executor.record import append_result
from executor.run_directory import Run, finish_run, load_run
from simulator.errors import InputError


class Page(HTMLParser):
    """Tags, attributes and the text of a page; checks that elements close in order."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def ids(self) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get("id"))]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    second = record("second case", predicted=330.0, measured=300.0, ideal=figures(646.0))
    sources = [write_run(folder / "a"), write_run(folder / "b", second)]
    files = plot(sources, folder / "out")
    return files, files[-1].read_text(encoding="utf-8")


def test_plot_writes_every_figure_as_png_and_svg_and_one_page(two_runs):
    files, _ = two_runs
    names = [path.name for path in files]
    stems = [f"{run}-{kind}" for run in "ab" for kind in ("timelines", "breakdown", "lost-time", "memory", "loss")]
    stems += ["throughput", "losses"]
    assert sorted(names) == sorted([*(f"{stem}.{end}" for stem in stems for end in ("png", "svg")), "report.html"])
    for path in files:
        start = path.read_bytes()[:8]
        assert start.startswith({".png": b"\x89PNG", ".svg": b"<svg", ".html": b"<!DOC"}[path.suffix])


def test_page_loads_nothing_from_anywhere(two_runs):
    _, text = two_runs
    page = Page(text)
    assert not page.open
    loading = {"script", "link", "iframe", "object", "embed", "base", "form", "audio", "video", "source"}
    assert not loading & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/"))
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert "@import" not in text
    # What is left of addresses names XML's languages and is never fetched.
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_page_can_stand_on_a_phone_and_be_read_aloud(two_runs):
    page = Page(two_runs[1])
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert ("html", {"lang": "en"}) in page.tags
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawings) == 12
    assert all(attributes["role"] == "img" for attributes in drawings)
    spoken = [attributes["aria-label"] or "" for attributes in drawings]
    assert len(set(spoken[:7])) == 7
    assert all(re.search(r"[0-9]", text) for text in spoken)
    captions = {word.strip() for word in page.words}
    assert not captions & set(spoken)  # no reader hears a caption twice
    assert all(a["scope"] == "col" for tag, a in page.tags if tag == "th")
    boxes = [a for tag, a in page.tags if a.get("class") == "scroll"]
    assert len(boxes) == [tag for tag, _ in page.tags].count("table")
    assert all(box["tabindex"] == "0" and box["aria-label"] for box in boxes)  # scrolls by keyboard too


def test_headings_never_skip_a_level(two_runs):
    levels = [int(tag[1]) for tag, _ in Page(two_runs[1]).tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_figure_and_table_stands_under_a_heading(two_runs):
    words = {word.strip() for word in Page(two_runs[1]).words}
    assert {
        "Predicted against measured", "The runs compared", "Losses compared", "1. sample", "Speed and memory",
        "One step, operation by operation", "A step's time", "Lost time by cause", "Memory over one step", "Loss",
        "A step's time in figures", "Policy", "Where it comes from",
    } <= words  # fmt: skip


def test_ids_are_unique_and_every_reference_has_its_target(two_runs):
    _, text = two_runs
    page = Page(text)
    ids = page.ids()
    assert len(ids) == len(set(ids))
    assert {"run-1", "run-2"} <= set(ids)
    assert [a["href"] for tag, a in page.tags if tag == "a"] == ["#run-1", "#run-2"]  # each case leads to its section
    assert set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text)) <= set(ids)


def test_page_says_what_the_records_say(two_runs):
    shown = {word.strip() for word in Page(two_runs[1]).words}
    assert {"second case", "+10.0 %", "−9.1 %", "330", "300", "646", "2.00 s"} <= shown  # TFLOPS, their error, step
    assert {"6.0 GiB", "22.0 GiB", "7,615,616,512", "98,304", "Sample GPU", "0123456789abcdef"} <= shown
    assert {"3, 3 × 1", "device, 4 × host, device", "2.13.0", "1 of 2", "none: held out"} <= shown
    assert {"backward on compute", "aaaaaaaaaaaa"} <= shown


def test_report_repeats_bit_for_bit(two_runs, tmp_path):
    files, text = two_runs
    again = plot([files[0].parent.parent / name for name in "ab"], tmp_path)
    assert again[-1].read_text(encoding="utf-8") == text
    for old, new in zip(files, again, strict=True):
        assert old.read_bytes() == new.read_bytes()


def test_results_files_and_run_directories_mix(tmp_path):
    results = tmp_path / "box.json"
    append_result(results, record("committed"))
    append_result(results, failed_record("32b"))
    runs = load_sources([results, write_run(tmp_path / "fresh"), tmp_path / "fresh" / "run.json"])
    assert [run.name for run in runs] == ["committed", "32b", "fresh", "fresh-2"]
    files = plot([results, tmp_path / "fresh"], tmp_path / "out")
    words = " ".join(Page(files[-1].read_text(encoding="utf-8")).words)
    assert "Refused: host memory short by 41 GiB" in words
    assert "committed-breakdown.svg" in {path.name for path in files}


def test_run_that_was_refused_has_a_page_too(tmp_path):
    finish_run(tmp_path / "refused", failed_record())
    (page,) = plot([tmp_path / "refused"], tmp_path / "out")
    assert "host memory short by 41 GiB" in page.read_text(encoding="utf-8")


def test_names_from_records_are_text_not_markup_nor_paths(tmp_path):
    evil = '<script>alert("x")</script>/../../up & "quoted"'
    results = tmp_path / "box.json"
    append_result(results, record(evil, versions={"<i>": "<b>1</b>"}, device_name="A&B <GPU>"))
    append_result(results, failed_record(evil, message="<b>no</b>"))
    files = plot([results], tmp_path / "out")
    page = Page(files[-1].read_text(encoding="utf-8"))
    assert not {"script", "i", "b"} & {tag for tag, _ in page.tags}
    assert any("A&B <GPU>" in word for word in page.words)
    assert {path.parent for path in files} == {tmp_path / "out"}
    assert {path.name for path in tmp_path.iterdir()} == {"box.json", "out"}


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("run-2", "did you mean .*run-1"),
        ("box.json", "not a list of run records"),
        ("empty.json", "no run records"),
        ("folder", "not a run directory"),
    ],
)
def test_source_that_cannot_be_drawn_is_named_and_nothing_is_written(tmp_path, source, complaint):
    write_run(tmp_path / "run-1")
    (tmp_path / "box.json").write_text('{"case": 1}')
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=complaint) as caught:
        plot([tmp_path / "run-1", tmp_path / source], tmp_path / "out")
    assert source in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_no_source_and_no_writable_output_are_said(tmp_path):
    with pytest.raises(InputError, match="at least one"):
        plot([], tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        plot([write_run(tmp_path / "run")], tmp_path / "file")


def test_largest_deviation_comes_first(tmp_path):
    frame = tables.deviations(load_run(write_run(tmp_path / "run")))
    # In the sample every layer takes 110 instead of 100 ms: most is lost in backwards, 4 x 2 x 10 ms.
    assert list(frame.iloc[0]) == ["backward on compute", "800 ms", "880 ms", "+80.0 ms", "+5.6 %"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["device", "host", "host", "device"], "device, 2 × host, device"),
        ([3, 1, 1, 1], "3, 3 × 1"),
        ([16384], "16,384"),
        (True, "yes"),
        (2048, "2,048"),
        ("global", "global"),
        ([], ""),
    ],
)
def test_decisions_are_summed_up(value, expected):
    assert tables.summary(value) == expected


def test_figures_keep_three_digits_and_a_true_sign():
    assert [tables.three_digits(v) for v in (0.0123, 2.0, 11.0, 649.4, 1234.0, 0.0, 0.000415)] == [
        "0.0123", "2.00", "11.0", "649", "1234", "0.000", "0.000415",
    ]  # fmt: skip
    assert [tables.format_duration(v) for v in (11.0, 0.0984, 4.1e-6)] == ["11.0 s", "98.4 ms", "4.10 µs"]
    assert [tables.format_error(v) for v in (0.0312, -0.02, -0.0001, float("nan"))] == [
        "+3.1 %",
        "−2.0 %",
        "0.0 %",
        "–",
    ]
    assert tables.error_share(103.0, 100.0) == pytest.approx(0.03)


def test_comparison_leaves_out_what_no_run_has():
    runs = [Run("a", record("a")), Run("b", failed_record("b"))]
    assert "ideal TFLOPS" not in tables.comparison(runs).columns
    runs.append(Run("c", record("c", ideal=figures(646.0))))
    frame = tables.comparison(runs)
    assert list(frame["ideal TFLOPS"]) == ["–", "–", "646"]
    assert list(frame["measured TFLOPS"]) == ["510", "refused", "510"]
    assert list(frame["#"]) == ["1", "2", "3"]


def test_a_run_is_summed_up_in_a_sentence():
    assert tables.sentence(record()) == (
        "qwen2 of 7.62 B parameters in 4 layers, 98,304 tokens a step in sequences of 1,024, on Sample GPU. "
        "Predicted 1.20 s a step, measured 1.18 s: the prediction is 2.0 % too high."
    )
    assert "2.0 % too low" in tables.sentence(record(predicted=510.0, measured=500.0))
    assert "the prediction is right." in tables.sentence(record(predicted=500.0, measured=500.0))
    assert tables.sentence(failed_record(inputs={})).endswith("on Sample GPU. Nothing was predicted or measured.")
    assert "Predicted 2.00 s a step." in tables.sentence(
        failed_record(predicted=300.0, predicted_from=record().predicted_from)
    )


def test_breakdown_table_names_every_cause_with_its_share():
    frame = tables.breakdown(record(measured=500.0))
    assert list(frame.iloc[0]) == ["forward", "400 ms", "400 ms", "33.3 %"]
    assert list(frame["compute"]) == ["forward", "backward", "waiting for weights"]
    assert sum(float(share.removesuffix(" %")) for share in frame["of step"]) == pytest.approx(100, abs=0.2)
    assert tables.breakdown(failed_record()).empty


def test_causes_that_are_new_are_lost_time_too():
    new = figures(500.0, breakdown_seconds={"forward": 1.0, "napping": 0.1, "waiting for updates": 0.1, "loss": 0.0})
    changed = record().model_copy(update={"measured": new})
    assert tables.lost_causes(changed) == ["waiting for weights", "waiting for updates", "napping"]
    assert "napping" in set(tables.breakdown(changed)["compute"])


def test_memory_that_may_not_be_used_is_not_listed():
    limits = {"device_memory_bytes": 8, "host_memory_bytes": 8, "nvme_memory_bytes": 0}
    listed = set(tables.origins(record(inputs={"limits": limits}))["what"])
    assert "host memory limit" in listed
    assert "NVMe limit" not in listed


def test_captions_are_written_as_text(two_runs):
    assert html.escape("Where a step's time goes") in two_runs[1]
