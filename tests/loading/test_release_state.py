"""What a release of each family wants of the repository at any time: its signatures, and its page on the Hub."""

from fresh_process import by_family, variant_of

from devtools import release, signatures
from devtools.families import load


@by_family
def test_the_build_has_the_signatures_of_its_version(family):
    path = signatures.file_of(load(family))
    assert (
        list(signatures.differences(signatures.read(path.read_text()), signatures.of_build(variant_of(family)))) == []
    )


@by_family
def test_every_version_up_to_this_one_is_kept(family):
    names = {path.name for path in (family / "signatures").iterdir()}
    assert names == {f"v{version}.json" for version in range(1, load(family).version + 1)}


@by_family
def test_the_card_is_filled_in(family):
    kept = signatures.read(signatures.file_of(load(family)).read_text())
    assert list(release.card_problems(load(family), kept)) == []


def test_differences():
    before = {"same": "(x)", "gone": "(x)", "changed": "(x)"}
    after = {"same": "(x)", "changed": "(x, y)", "added": "()"}
    assert list(signatures.differences(before, after)) == [
        "added is new",
        "changed was (x) and is (x, y)",
        "gone is missing",
    ]
