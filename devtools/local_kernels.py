"""Points the kernels library at local builds."""

from collections.abc import Sequence

from devtools.families import Family


def setting(families: Sequence[Family], directory: str = "build") -> dict[str, str]:
    """Returns the environment variable that makes get_kernel load these families from here.

    Args:
        families: The families that must be found.
        directory: The directory in each family that holds the variants, as a profile names it.
    """
    places = (f"{family.repository}={family.directory / directory}" for family in families)
    return {"LOCAL_KERNELS": ":".join(places)}
