"""What a release of each family wants of the repository at any time: its signatures, and its page on the Hub."""

from collections import namedtuple
from enum import Enum
from types import SimpleNamespace

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


class Options:
    def __init__(self, top_k, renormalize=False):
        pass


class Kind(Enum):
    SERIAL = "serial"


Pair = namedtuple("Pair", ["first"])


def test_constructors_and_attributes_are_signatures():
    kernel = SimpleNamespace(Kind=Kind, Options=Options, Pair=Pair, __all__=["Kind", "Options", "Pair"])
    assert signatures.describe(kernel) == {
        "Kind": "class(Enum)",
        "Kind.SERIAL": "<Kind.SERIAL: 'serial'>",
        "Options": "class(object)",
        "Options.__init__": "(self, top_k, renormalize=False)",
        "Pair": "class(tuple)",
        "Pair.first": "attribute",
    }
