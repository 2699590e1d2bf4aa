"""The check of the workflows accepts the project's and finds seeded errors; what they ask for is found."""

import json
import shutil
import subprocess
import sys

import pytest

from devtools import affected, workflows
from devtools.errors import Failure
from devtools.families import discover
from devtools.project import ROOT

TESTS, NIX, DEVICES, RELEASE = (f".github/workflows/{name}.yml" for name in ("tests", "nix", "devices", "release"))
CHECKOUT = "actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1"
HF_TOKEN = "HF_TOKEN: ${{ secrets.HF_TOKEN }}"

# name: (file, its text, what replaces it, part of a message)
ERRORS = {
    "not_yaml": (TESTS, "jobs:", "jobs: [", "invalid YAML"),
    "unknown_key": (TESTS, "steps:", "stages:", "'stages'"),
    "pinned_by_tag": (TESTS, CHECKOUT, "actions/checkout@v7.0.1", "tests.yml:27: actions/checkout is to be pinned"),
    "pinned_by_tag_in_an_action": (
        ".github/actions/install-nix/action.yml",
        "cachix/cachix-action@1eb2ef646ac0255473d23a5907ad7b04ce94065c # v17",
        "cachix/cachix-action@v17",
        "(unpinned-uses)",
    ),
    "no_version": (NIX, " # v7.0.1", "", "actions/checkout is to be pinned by its commit, followed by # and"),
    "pinned_in_two_ways": (RELEASE, "3d3c42e5", "3d3c42e6", "actions/checkout is pinned as 3d3c42e5"),
    "permissions_of_all_jobs": (TESTS, "permissions: {}\n", "", "(excessive-permissions)"),
    "permissions_to_write": (TESTS, "permissions: {}", "permissions: write-all", "(excessive-permissions)"),
    "no_permissions": (
        DEVICES,
        "    permissions:\n      contents: read # for the checkout\n",
        "",
        "job families: has no permissions",
    ),
    "credentials_stay": (TESTS, "persist-credentials: false", "fetch-depth: 1", "(artipacked)"),
    "no_timeout": (NIX, "    timeout-minutes: 350\n", "", "nix.yml: job build: has no timeout-minutes"),
    "no_concurrency": (
        RELEASE,
        "concurrency:\n  group: release-${{ github.ref }}\n  cancel-in-progress: false\n",
        "",
        "(concurrency-limits)",
    ),
    "concurrency_of_all_releases": (
        RELEASE,
        "group: release-${{ github.ref }}",
        "group: release",
        "release.yml: the concurrency group release is that of every ref",
    ),
    "permission_to_write": (NIX, "contents: read", "contents: write", "nix.yml: job families: may write contents"),
    "injection": (RELEASE, '"$TAG"', '"${{ github.event.release.tag_name }}"', "(template-injection)"),
    "secret_without_environment": (RELEASE, "    environment: hub\n", "", "(secrets-outside-env)"),
    "unreadable_expression": (NIX, "families != '[]'", "families ! = '[]'", "couldn't parse expression"),
    "family_by_name": (
        DEVICES,
        "family: ${{ fromJSON(needs.families.outputs.cuda) }}",
        "family: [normalization]",
        "devices.yml: family normalization is named, where devtools.affected is to find the families",
    ),
    "unknown_command": (TESTS, "./dev lint", "./dev lintel", "tests.yml: ./dev lintel is no command"),
    "unknown_option": (
        DEVICES,
        "--backend cuda",
        "--backend rocm",
        './dev build --backend rocm "$FAMILY" is no command',
    ),
    "unknown_module": (NIX, "devtools.affected", "devtools.effected", "python3 -m devtools.effected is no command"),
    "unknown_option_of_a_module": (RELEASE, '--tag "$TAG"', '--tags "$TAG"', '--tags "$TAG" is no command'),
    "unknown_variable": (
        RELEASE,
        '"./$FAMILY"',
        '"./$TITLE"',
        "job publish: the variable TITLE is not defined in Build",
    ),
    "unknown_action": (
        NIX,
        "$/.github/actions/install-nix",
        "$/.github/actions/nix",
        "uses $/.github/actions/nix, which does not exist",
    ),
    "unknown_workflow": (RELEASE, "workflows/tests.yml", "workflows/test.yml", "test.yml, which does not exist"),
    "unknown_job": (RELEASE, "tests, ready]", "tests, steady]", "job publish: needs steady, which is no job"),
    "unknown_matrix_key": (
        NIX,
        "matrix.platform.runner }}",
        "matrix.runner }}",
        "job build: matrix.runner is not defined",
    ),
    "job_not_needed": (
        RELEASE,
        "needs: [family, tests, ready]",
        "needs: [tests, ready]",
        "job publish: needs.family is not defined",
    ),
    "unknown_output": (
        DEVICES,
        "needs.families.outputs.metal !=",
        "needs.families.outputs.mps !=",
        "job metal: needs.families has no output mps",
    ),
    "unknown_step": (RELEASE, "id: find", "id: found", "job family: steps.find is not defined"),
}


@pytest.fixture
def checkout(tmp_path):
    """A copy of the workflows that a test may spoil."""
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    for family in discover():
        (tmp_path / family.title).mkdir()
        shutil.copy(family.directory / "build.toml", tmp_path / family.title)
    return tmp_path


def test_workflows_are_accepted(checkout):
    assert workflows.findings(checkout) == []


@pytest.mark.parametrize("name", ERRORS)
def test_seeded_error_is_found(checkout, name):
    path, old, new, message = ERRORS[name]
    text = (checkout / path).read_text()
    assert old in text
    (checkout / path).write_text(text.replace(old, new, 1))
    found = workflows.findings(checkout)
    assert any(message in line for line in found), found


@pytest.mark.parametrize(
    ("path", "touched"),
    [
        ("normalization/cpu/row.inl.h", ["normalization"]),
        ("common/dtype.h", ["normalization"]),
        ("flake.lock", ["normalization"]),
        ("normalization-notes.md", []),
        ("simt/common/dtype.h", []),
        ("README.md", []),
    ],
)
def test_affected_families(path, touched):
    families = [family for family in discover() if family.title == "normalization"]
    assert [family.title for family in affected.affected(families, [path])] == touched


@pytest.mark.parametrize("tag", ["normalization-v1", "normalization-v1.2"])
def test_tag_of_a_release(tag):
    assert affected.released(tag).title == "normalization"


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("v1", "the tag of a release is <family>-v<version>.<number>, not v1"),
        ("normalization-v1-rc1", "the tag of a release is"),
        # Which ./dev release would not take for the release before the next.
        ("normalization-v1.2.3", "the tag of a release is"),
        ("none-v1", "there is no family none"),
        ("normalization-v9", "normalization-v9 does not release normalization, whose build.toml has version 1"),
    ],
)
def test_other_tag_is_refused(tag, message):
    with pytest.raises(Failure, match=message):
        affected.released(tag)


EVERY = json.dumps([family.title for family in discover()]) + "\n"


def run(*arguments):
    command = [sys.executable, "-m", "devtools.affected", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("--since", ""), EVERY),
        (("--since", "0" * 40), EVERY),
        (("--since", "HEAD"), "[]\n"),
        (("--backend", "cuda"), json.dumps([each.title for each in discover() if "cuda" in each.backends]) + "\n"),
        (("--backend", "none"), "[]\n"),
        (("--tag", "normalization-v1"), "normalization\n"),
    ],
)
def test_command(arguments, printed):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_command_fails_for_another_tag():
    done = run("--tag", "none-v1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: there is no family none")
