"""./dev release: what it refuses, and what it shows and does."""

import json
import subprocess
from collections.abc import Iterator

import pytest
from conftest import Checkout, assert_fails, copied

from devtools import release

CARD = """\
---
library_name: kernels
license: apache-2.0
---

# rudnn-toy

## Use

Load it.

## API

`add_one(input)` adds one.

## Devices and dtypes

float32 on the CPU.

## Figures

None, as of 2026-11-29.

## Limits

It cannot subtract.
"""

PACKAGE = '''\
"""Adds."""

from ._ops import ops

__all__ = ["add_one"]


def add_one(input):
    """Returns input + 1."""
    return ops.add_one(input)
'''

SIGNATURES = "toy/signatures/v1.json"
SOURCE = "toy/torch-ext/rudnn_toy/__init__.py"


def git(checkout: Checkout, *arguments: str) -> str:
    author = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
    return subprocess.run(
        ["git", *author, *arguments], cwd=checkout.root, check=True, capture_output=True, text=True
    ).stdout


def commit(checkout: Checkout) -> None:
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "Change")


@pytest.fixture(scope="module")
def ready(built, tmp_path_factory) -> Checkout:
    """A repository whose toy family is ready for its first release."""
    checkout = copied(built, tmp_path_factory.mktemp("ready"))
    for name, text in {
        ".gitignore": ".cache\n.venv\n__pycache__\nbuild\n",
        SOURCE: PACKAGE,
        "toy/CARD.md": CARD,
        "toy/benchmarks/benchmark.py": "# Loaded by kernels benchmark.\n",
        "toy/benchmarks/suite.py": "# Ours.\n",
    }.items():
        (checkout.root / name).parent.mkdir(exist_ok=True)
        (checkout.root / name).write_text(text)
    git(checkout, "init", "--quiet")
    commit(checkout)
    written = checkout.dev("release", "--write-signatures", "toy")
    assert written.returncode == 0, written.stdout + written.stderr
    commit(checkout)
    return checkout


@pytest.fixture
def repository(ready) -> Iterator[Checkout]:
    """That repository; what a test commits, tags and leaves behind is taken back, what it builds is not."""
    start = git(ready, "rev-parse", "HEAD").strip()
    yield ready
    git(ready, "checkout", "--quiet", "--force", "--detach", start)
    git(ready, "clean", "--quiet", "--force", "-d")
    for tag in git(ready, "tag").split():
        git(ready, "tag", "--delete", tag)


def lines_of(checkout: Checkout, expression: str) -> str:
    """What the tools say about the family, one line each."""
    code = (
        "from devtools import release, variant\n"
        "from devtools.families import discover\n"
        "(family,) = discover()\n"
        f"print({expression}, sep='\\n')\n"
    )
    python = checkout.root / ".venv" / "bin" / "python"
    return subprocess.run([python, "-c", code], cwd=checkout.root, check=True, capture_output=True, text=True).stdout


def assert_refused(checkout: Checkout, check: str, *reasons: str) -> None:
    """A dry run refuses for this one check, and says why."""
    done = checkout.dev("release", "--dry-run", "toy")
    assert_fails(done, "not ready for a release", check)
    assert [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("REFUSED")] == [check]
    for reason in reasons:
        assert reason in done.stdout
    assert "nothing was tagged" not in done.stdout


def test_a_dry_run_shows_what_would_be_uploaded(repository):
    done = repository.dev("release", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "toy-v1.0 to kernel repository rudnn/rudnn-toy" in done.stdout
    shown = {line.split()[-1]: line.split()[0] for line in done.stdout.splitlines() if line.startswith("     ")}
    (variant,) = (repository.family / "build").iterdir()
    files = {f"build/{variant.name}/{path.name}": path for path in variant.iterdir() if path.is_file()}
    files["README.md"] = repository.family / "CARD.md"
    files["benchmarks/benchmark.py"] = repository.family / "benchmarks" / "benchmark.py"
    assert shown == {name: f"{path.stat().st_size / 1e3:,.1f}" for name, path in files.items()}
    assert done.stdout.rstrip().endswith("nothing was tagged")
    assert git(repository, "tag") == ""


def test_a_tree_that_is_not_clean(repository):
    (repository.family / "notes.txt").write_text("Mine.\n")
    repository.edit("toy/CARD.md", "Load it.", "Load it well.")
    assert_refused(repository, "clean tree", "the tree is not clean", "toy/CARD.md", "toy/notes.txt")


def test_a_shallow_clone(repository):
    """Whose tags, and so the last release, may be missing."""
    shallow = repository.root / ".git" / "shallow"
    shallow.write_text(git(repository, "rev-parse", "HEAD"))
    try:
        found = lines_of(repository, "*release.tree_problems()")
    finally:
        shallow.unlink()
    assert found.startswith("the clone is shallow, so earlier releases may be missing: git fetch --unshallow --tags")


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("(input)", "(input, times=1)", "add_one was (input) and is (input, times=1)"),
        ('__all__ = ["add_one"]', '__all__ = ["add_one", "ops"]', "ops is new"),
        ('__all__ = ["add_one"]', "__all__ = []", "add_one is missing"),
    ],
    ids=["parameter", "added", "removed"],
)
def test_a_changed_signature(repository, old, new, reason):
    repository.edit(SOURCE, old, new)
    repository.edit("toy/CARD.md", "add_one(input)", f"add_one{new if old == '(input)' else '(input)'}")
    commit(repository)
    assert_refused(repository, "toy: signatures", f"{SIGNATURES}: {reason}", "raise version in toy/build.toml")


def test_annotations_and_docstrings_may_change(repository):
    repository.edit(SOURCE, '(input):\n    """Returns input + 1."""', '(input: object) -> object:\n    """Adds one."""')
    commit(repository)
    assert repository.dev("release", "--dry-run").returncode == 0


def test_a_new_version_needs_its_own_file(repository):
    git(repository, "tag", "toy-v1.0")
    repository.edit(SOURCE, "(input)", "(input, times=1)")
    repository.edit("toy/CARD.md", "(input)", "(input, times=1)")
    repository.edit("toy/build.toml", "version = 1", "version = 2")
    commit(repository)
    assert_refused(repository, "toy: signatures", "toy/signatures/v2.json does not exist")
    assert repository.dev("release", "--write-signatures", "toy").returncode == 0
    commit(repository)
    done = repository.dev("release", "--dry-run", "toy")
    assert done.returncode == 0, done.stdout
    assert "toy-v2.0 to kernel repository" in done.stdout
    assert "branch v2" in done.stdout


def test_signatures_that_were_released_stay(repository):
    git(repository, "tag", "toy-v1.0")
    repository.edit(SOURCE, "(input)", "(input, times=1)")
    repository.edit("toy/CARD.md", "(input)", "(input, times=1)")
    assert_fails(repository.dev("release", "--write-signatures", "toy"), SIGNATURES, "was released with toy-v1.0")
    repository.edit(SIGNATURES, "(input)", "(input, times=1)")
    commit(repository)
    assert_refused(repository, "toy: version", SIGNATURES, "toy-v1.0", "add_one was (input) and is (input, times=1)")


def test_a_version_that_goes_back(repository):
    git(repository, "tag", "toy-v2.0")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "Later")
    found = lines_of(repository, "*release.version_problems(family)")
    assert found == "toy/build.toml has version 1, but toy-v2.0 was released\n"


def test_only_releases_of_this_family_and_this_line_count(repository):
    git(repository, "tag", "other-v9.0")
    git(repository, "tag", "toy-v9.0-draft")
    git(repository, "tag", "toy-v1.9")
    git(repository, "tag", "toy-v1.10")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "Aside")
    git(repository, "tag", "toy-v9.0")
    git(repository, "checkout", "--quiet", "--detach", "HEAD^")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "Later")
    assert lines_of(repository, "release.Release.next(family).tag") == "toy-v1.11\n"


def test_a_commit_that_has_its_tag_is_still_that_release(repository):
    """A workflow that a tag starts compares with the release before."""
    git(repository, "tag", "toy-v1")
    repository.edit(SIGNATURES, "(input)", "(input, times=1)")
    commit(repository)
    git(repository, "tag", "toy-v1.1")
    assert lines_of(repository, "release.Release.next(family).tag") == "toy-v1.1\n"
    assert f"{SIGNATURES} is not that of toy-v1 " in lines_of(repository, "*release.version_problems(family)")


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("license: apache-2.0", "license: mit", "must give license: apache-2.0 in its header, got mit"),
        ("## Limits", "## Bounds", "has no section Limits"),
        ("It cannot subtract.\n", "", "has no section Limits, or an empty one"),
        ("`add_one(input)`", "This", "does not list add_one(input) in its section API"),
        ("(input)", "(input, times=1)", "does not list add_one(input) in its section API, but add_one(input, times=1)"),
        ("on the CPU", "anywhere", "says nothing about CPU"),
        ("2026-11-29", "today", "gives no date in its section Figures"),
        ("Load it.", "Load {{ repo_id }}.", "toy/CARD.md:10: is not filled in: Load {{ repo_id }}."),
    ],
    ids=["license", "section", "empty_section", "function", "parameters", "device", "date", "placeholder"],
)
def test_a_card_that_is_not_filled_in(repository, old, new, reason):
    check = '*release.card_problems(family, {"add_one": "(input)"})'
    assert lines_of(repository, check) == "\n"
    repository.edit("toy/CARD.md", old, new)
    found = lines_of(repository, check)
    assert found.startswith("toy/CARD.md")
    assert found.count("\n") == 1
    assert reason in found


def test_parameters_are_compared_by_what_they_say():
    assert release._same_parameters("(x, *, epsilon=1e-05, kind='silu')", '(x, *, epsilon=1e-5, kind="silu")')
    assert not release._same_parameters("(x, *, epsilon=1e-05)", "(x, epsilon=1e-5)")
    assert release._same_parameters("(x=<none>)", "(x=<none>)")
    assert not release._same_parameters("(x=<none>)", "(x)")


@pytest.mark.parametrize(
    "old, new", [("license:", "license: ["), ("library_name: kernels\nlicense: apache-2.0", "text")]
)
def test_a_card_whose_header_cannot_be_read(repository, old, new):
    repository.edit("toy/CARD.md", old, new)
    assert lines_of(repository, "*release.card_problems(family, {})").startswith("toy/CARD.md cannot be read: ")


def test_a_card_that_is_not_text(repository):
    (repository.family / "CARD.md").write_bytes(b"\xff")
    assert lines_of(repository, "*release.card_problems(family, {})").startswith("toy/CARD.md cannot be read: ")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_signatures_that_cannot_be_read(repository, text):
    git(repository, "tag", "toy-v1.0")
    (repository.root / SIGNATURES).write_text(text)
    git(repository, "commit", "--quiet", "--all", "--message", "Change")
    found = lines_of(repository, "*release.version_problems(family), *release.signature_problems(family, {})")
    assert len(found.splitlines()) == 2
    assert all("it cannot be read: " in line for line in found.splitlines()), found


def test_a_variant_that_is_left_over(repository):
    stale = repository.family / "build" / "torch29-cxx11-cu126-x86_64-linux"
    stale.mkdir()
    try:
        assert_refused(
            repository, "toy: variants", "torch29-cxx11-cu126-x86_64-linux is not built from here, remove it"
        )
    finally:
        stale.rmdir()


def test_problems_of_a_variant(repository):
    """What a build would mend is looked at all the same, since the build checks the ABI of new libraries only."""
    (variant,) = (repository.family / "build").iterdir()
    metadata = json.loads((variant / "metadata.json").read_text())
    metadata["version"] = 3
    del metadata["digest"]["files"]["_ops.py"]
    (variant / "metadata.json").write_text(json.dumps(metadata))
    (library,) = variant.glob("*.so")
    library.unlink()
    found = lines_of(repository, "*release.variant_problems(family, [variant.Variant(family, variant.CPU)])")
    for problem in (
        "has version 3, but toy/build.toml has 1",
        "_ops.py",
        f"{library.name} is missing",
    ):
        assert f"toy/build/{variant.name}: " in found
        assert problem in found


def test_a_release_tags_the_commit(repository):
    done = repository.dev("release", "toy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "git push origin toy-v1.0" in done.stdout
    assert git(repository, "tag", "--points-at", "HEAD").split() == ["toy-v1.0"]


def test_what_is_not_ready_is_not_tagged(repository):
    repository.edit("toy/CARD.md", "## Limits", "## Bounds")
    commit(repository)
    assert_fails(repository.dev("release", "toy"), "not ready for a release", "toy: CARD.md")
    assert git(repository, "tag") == ""
