"""The prose: its command lines parse, its tree is the project's, its printed program is the builder's."""

import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.cli import parse
from analysis.options import COMMANDS
from analysis.results import BEGIN, END
from executor.config import load_config

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
def test_every_command_line_is_one_that_conveyor_takes(file: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    if len(words) == 1 and words[0] in {command.name for command in COMMANDS}:
        return  # the name of a command in a sentence
    if words == ["--help"]:
        return
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
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        missing += [f"{path.name}: {link}" for link in links if not (path.parent / link).exists()]
    assert missing == []


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
