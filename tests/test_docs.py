"""The prose: its command lines parse, its tree is the project's, its printed program is the builder's."""

import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from data_cases import corpus_of, written_rows

from analysis.cli import main, parse
from analysis.options import COMMANDS
from analysis.results import BEGIN, END
from executor.config import TrainConfig, load_config
from executor.data.conversation import DIALECTS, ROLES
from executor.data.documents import LongSamples
from executor.data.row_files import ROW_SUFFIXES
from executor.data.row_kind import KINDS, check_columns
from simulator.datasheet import H200_DERATING
from simulator.hardware import AttentionPoint, HardwareProfile, Link, MatmulPoint, catalogue_names
from simulator.machine import Device, Disk, Host
from simulator.predict import ALLOCATOR_SLACK, MOST_ALLOCATOR_SLACK_BYTES
from simulator.units import format_bytes

ROOT = Path(__file__).parents[1]
PACKAGES = ("simulator", "planner", "executor", "analysis")
PROSE = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def command_lines(text: str) -> Iterator[str]:
    """Every `conveyor ...` of a text: lines of code blocks, continued ones joined, and code inside sentences."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    for line in joined.splitlines():
        if found := re.match(r"\s*(?:\$ )?(?:\S*/)?conveyor (?P<arguments>\S.*)", line):
            yield found["arguments"]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`]+)`", prose):
        if found := re.fullmatch(r"(?:\S*/)?conveyor (?P<arguments>.+)", " ".join(span.split())):
            yield found["arguments"]


def all_command_lines() -> list[tuple[str, str]]:
    return [(path.name, line) for path in PROSE for line in command_lines(path.read_text(encoding="utf-8"))]


def tree_paths(text: str) -> list[str]:
    """Paths of the first code block under `## The tree`: indented names below a folder's name, which ends in `/`."""
    block = text.partition("\n## The tree\n")[2].split("```")[1]
    folders: list[str] = []
    paths = []
    for line in block.strip("\n").splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name]
        paths.append("".join(folders))
    return paths


def test_command_lines_are_found_in_blocks_and_sentences() -> None:
    text = (
        "Say `conveyor doctor` or\n`conveyor\nplot runs`, not conveyor.\n\n    conveyor plan --model m \\\n"
        "        --json  # why\n\n```sh\n$ .venv/bin/conveyor probe\n```\n"
    )
    assert sorted(command_lines(text)) == ["doctor", "plan --model m --json  # why", "plot runs", "probe"]


@pytest.mark.parametrize(("file", "line"), all_command_lines())
def test_every_command_line_is_one_that_conveyor_takes(
    file: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(line, comments=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "small").mkdir(parents=True)  # outputs go into folders that are there
    if len(words) == 1 and words[0] in {command.name for command in COMMANDS}:
        return  # the name of a command in a sentence
    if words in (["--help"], ["COMMAND", "--help"]):
        return  # tested below for every command
    model = getattr(parse(words), "model", None)  # a wrong line ends the parser with a sentence
    if model and model.startswith("simulator/"):
        assert (ROOT / model).is_file(), f"{file}: there is no {model}"


def test_the_readme_shows_the_three_verbs_and_what_comes_before_them() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [shlex.split(line, comments=True) for line in command_lines(text)]
    assert {words[0] for words in shown if len(words) > 1} >= {"probe", "measure", "plan", "simulate", "train", "plot"}


def test_the_run_config_of_the_readme_is_accepted(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "run.yaml").write_text(block, encoding="utf-8")
    config = load_config(tmp_path / "run.yaml")
    assert config.learning_rate == 2e-5
    assert config.tokens_per_step == 32 * config.sequence_length


def test_the_tree_names_what_exists() -> None:
    paths = tree_paths((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(set(paths)) == len(paths)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_tree_names_every_module() -> None:
    named = set(tree_paths((ROOT / "README.md").read_text(encoding="utf-8")))
    modules = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {path for path in modules if not path.endswith("/__init__.py")} - named == set()


def test_files_and_modules_named_in_sentences_exist() -> None:
    missing = []
    for path in PROSE:
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"`((?:simulator|planner|executor|analysis|tests|docs)/[\w./-]+\.\w+)`", text)
        missing += [f"{path.name}: {name}" for name in names if "NAME" not in name and not (ROOT / name).is_file()]
        modules = re.findall(r"python -m ([a-z_]+(?:\.[a-z_]+)+)", text)
        missing += [f"{path.name}: {name}" for name in modules if importlib.util.find_spec(name) is None]
    assert missing == []


def links(path: Path) -> list[str]:
    """Targets of a page's links and images, code left out."""
    text = re.sub(r"^```.*?^```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(path: Path) -> set[str]:
    """What can be linked to in a page: its headings, as GitHub spells them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PROSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in links(page):
        if re.match(r"https://", link):
            continue  # other people's pages are not ours to test
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        inside = target.is_relative_to(ROOT) and target.exists()
        if not inside or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_found_from_the_readme_and_the_index() -> None:
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")} - {"docs/README.md"}
    assert pages - set(links(ROOT / "README.md")) == set()
    assert pages - {f"docs/{link}" for link in links(ROOT / "docs/README.md")} == set()


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_help_of_every_command_works(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: conveyor {command}")


def test_every_command_is_shown_with_its_arguments_somewhere() -> None:
    shown = {shlex.split(line, comments=True)[0] for _, line in all_command_lines()}
    assert {command.name for command in COMMANDS} - shown == set()


def test_the_step_that_is_followed_names_what_is_in_its_files() -> None:
    """Functions, classes and files of the walk through one step exist where it says."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## One step, followed\n")[2]
    walk = text.partition("\n## ")[0]
    files = re.findall(r"`((?:simulator|executor)/\w+\.py)`", walk)
    assert {"executor/trainer.py", "simulator/build.py", "executor/runner.py", "executor/layer.py"} <= set(files)
    source = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in [*files, "simulator/check.py"])
    names = {part for span in re.findall(r"`([A-Za-z_][\w.]*)`", walk) if ".py" not in span for part in span.split(".")}
    assert len(names) > 20
    assert {name for name in names if not re.search(rf"\b{name}\b", source)} == set()


def test_the_plan_of_the_readme_is_what_the_planner_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where this fails after a change that is meant, run the command above the block and paste what it prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, after = text.partition("```text\n")
    printed = after.partition("```")[0]
    command = re.sub(r"\s*\\\n\s*", " ", before).strip().splitlines()[-1]
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0

    def stable(plan: str) -> list[str]:
        return [line for line in plan.strip().splitlines() if not line.startswith("found by ")]  # names versions

    assert stable(capsys.readouterr().out) == stable(printed)


def test_every_field_and_machine_of_a_profile_is_explained() -> None:
    text = (ROOT / "docs/hardware.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.-]+)`", text))
    groups = {"device": Device, "host": Host, "disk": Disk, "link": Link}
    fields = {name for name in HardwareProfile.model_fields if name not in groups}
    fields |= {f"{group}.{name}" for group, schema in groups.items() for name in schema.model_fields}
    assert fields - named == set()
    points = {name for schema in (MatmulPoint, AttentionPoint) for name in schema.model_fields}
    assert {name for name in points if not name.endswith("_per_second")} - named == set()
    assert set(catalogue_names()) - named == set()


def test_the_factors_of_datasheets_are_those_of_the_code() -> None:
    rows = dict(
        re.findall(r"^\| (.+?) \| ([\d./, ]+?)(?: of .*)? \|$", page_text("docs/hardware.md"), flags=re.MULTILINE)
    )
    found = {what: tuple(map(float, re.findall(r"[\d.]+", shares))) for what, shares in rows.items()}
    d = H200_DERATING
    assert found == {
        "dense bf16 products": (d.matmul,),
        "attention at 1,024 / 4,096 / 32,768, forward": tuple(share.forward for share in d.attention),
        "the same, backward": tuple(share.backward for share in d.attention),
        "device memory's rate": (d.hbm,),
        "the link at 1 / 4 / 16 MiB": tuple(share.share for share in d.link),
        "the link both ways at once": (d.link_duplex,),
        "host DRAM": (d.host_dram,),
        "capacities: device, host": (d.device_memory, d.host_memory),
    }


def test_the_allocators_slack_is_that_of_the_code() -> None:
    most = format_bytes(MOST_ALLOCATOR_SLACK_BYTES).replace(".0", "")
    in_formula = f"{100 * ALLOCATOR_SLACK:.0f} % of (replayed peak - persistent), at most {most}"
    assert in_formula in page_text("docs/architecture.md")
    in_words = f"the allocator's slack ({100 * ALLOCATOR_SLACK:.0f} % of what passes, at most {most})"
    assert in_words in page_text("docs/planner.md")


def page_text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_printed_program_is_what_the_builder_writes() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    ((program, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, flags=re.DOTALL)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(program, "docs/architecture.md", "exec"), {})
    assert output.getvalue() == printed


def test_the_readme_has_one_place_for_results_before_the_walk_and_the_tree() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    places = [text.index(part) for part in (BEGIN, END, "\n## One step, followed\n", "\n## The tree\n")]
    assert places == sorted(places)
    assert text.count(BEGIN) == text.count(END) == 1


def test_the_rows_that_are_shown_are_rows_of_the_kind_they_stand_under(tmp_path: Path) -> None:
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    shown = re.findall(r"^`([a-z-]+)`:(?:(?!```).)*?```json\n(.*?)```", text, flags=re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in shown] == [kind.name for kind in KINDS]
    for kind, row in shown:
        corpus = corpus_of(written_rows(tmp_path, row.strip()))
        assert corpus.read.kinds == {kind: 1}


def test_the_settings_and_names_of_the_page_on_data_are_the_codes() -> None:
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    (columns,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    check_columns(yaml.safe_load(columns)["columns"])
    keys = set(re.findall(r"`([a-z_]+): [a-z]+`", text)) | {"columns", "cache", "long_samples"}
    assert keys <= set(TrainConfig.model_fields) | {"data"}
    assert set(re.findall(r"^\| `([a-z]+)` \|", text, flags=re.MULTILINE)) == set(get_args(LongSamples))
    first_column = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `."))
    assert set(ROW_SUFFIXES) <= set(re.findall(r"`(\.[a-z]+)`", first_column))
    for role in (*ROLES, *DIALECTS):
        assert f"`{role}`" in text
