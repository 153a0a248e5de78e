"""Contracts with the hosts: names that a release must have, and what they are called with. No version decides.

Standard library only: MACE's adapter looks at its contract while MACE is imported.
"""

import functools
import importlib
import inspect
import warnings
from typing import Any, Collection, Iterable, List, Mapping, Optional, Sequence


def name_of(term: str) -> str:
    """The dotted name in a term of a contract.

    >>> name_of("MACELoss.update(batch, output)")
    'MACELoss.update'
    """
    return term.partition("(")[0]


def has(owner: Any, name: str) -> bool:
    """Whether a module or class has a dotted name.

    >>> has(str, "join"), has(str, "join.no")
    (True, False)
    """
    for part in name.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


def problem(owner: Any, term: str, label: str) -> str:
    """What is wrong with one name of a host, or an empty string.

    Parameters
    ----------
    owner : module or class
    term : str
        ``name``: has to be there. ``name(a, b)``: has these parameters and no more. ``name(a, b, ..., c)``: has these
        first, and ``c`` at any place after them. ``self`` is not counted, nor are ``*args`` and ``**kwargs``.
    label : str
        What to call the owner.

    Examples
    --------
    >>> import json
    >>> problem(json, "JSONDecoder.decode(s, ...)", "json")
    ''
    >>> problem(json, "JSONDecoder.read", "json")
    'json has no JSONDecoder.read'
    >>> problem(json, "JSONDecoder.raw_decode(text)", "json")
    'json.JSONDecoder.raw_decode takes (s, idx), not (text)'
    """
    name, called, wanted = term.removesuffix(")").partition("(")
    if not has(owner, name):
        return f"{label} has no {name}"
    if not called:
        return ""
    for part in name.split("."):
        owner = getattr(owner, part)
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = [p.name for p in inspect.signature(owner).parameters.values() if p.kind not in any_number]
    taken = taken[1:] if taken[:1] == ["self"] else taken
    first, more, further = wanted.partition("...")
    leading, others = _listed(first), taken[len(_listed(first)) :]
    if taken[: len(leading)] == leading and (more or not others) and set(_listed(further)) <= set(others):
        return ""
    return f"{label}.{name} takes ({', '.join(taken)}), not ({wanted})"


def _listed(text: str) -> List[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def problems_of(owner: Any, terms: Iterable[str], label: str, optional: Collection[str] = ()) -> List[str]:
    """What is wrong with one module or class of a host, a line for each name.

    Parameters
    ----------
    owner, label
        As for `problem`.
    terms : iterable of str
        Likewise.
    optional : collection of str
        Names, with the label in front, that may be missing. Where they are there, they have to be as their terms say.

    Examples
    --------
    >>> import json
    >>> problems_of(json, ["load(fp, ...)", "read"], "json")
    ['json has no read']
    >>> problems_of(json, ["load(fp, ...)", "read"], "json", optional=["json.read"])
    []
    """
    wanted = [term for term in terms if f"{label}.{name_of(term)}" not in optional or has(owner, name_of(term))]
    return [text for text in (problem(owner, term, label) for term in wanted) if text]


def problems(terms: Mapping[str, Iterable[str]], optional: Collection[str] = ()) -> List[str]:
    """The same of a whole host, whose modules are imported; ``terms`` by module, which may be optional, too.

    Examples
    --------
    >>> problems({"json": ["load(fp, ...)", "read"], "json.yaml": ["load"]})
    ['json has no read', 'there is no json.yaml']
    """
    found = []
    for module, wanted in terms.items():
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # What the host itself lacks is no question of its release.
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            if module not in optional:
                found.append(f"there is no {module}")
            continue
        found += problems_of(owner, wanted, module, optional)
    return found


def installed(distribution: str) -> Optional[str]:
    """Version of an installed distribution, None without one."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def explained(reasons: Sequence[str], host: str, version: Optional[str], tested: Sequence[str]) -> str:
    """Return what is wrong with a release of a host and which ones were tested, or an empty string without reasons.

    >>> explained(["json has no read"], "json", "2.0", ("3.0", "3.1"))
    'json has no read (json 2.0 is installed; tested: 3.0, 3.1)'
    """
    installed_one = f"{host} {version or 'of unknown version'} is installed; tested: {', '.join(tested)}"
    return f"{'; '.join(reasons)} ({installed_one})" if reasons else ""


@functools.cache
def warn_if_untested(host: str, version: Optional[str], tested: Sequence[str]) -> None:
    """Warn, once in a process, of a release whose contract holds but that nobody has tried."""
    if version not in tested:
        warnings.warn(
            f"{host} {version} was not tested with e2ip-plugins (tested: {', '.join(tested)}); "
            "it has what is needed, and is used",
            stacklevel=4,
        )
