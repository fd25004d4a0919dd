"""Whether an optional library is there, in a version that lockstep works with; it is not imported to find out."""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from lockstep.core.errors import UsageError


@dataclass(frozen=True)
class Distribution:
    """A library as package indexes know it, and what of it lockstep works with."""

    name: str
    """Of the distribution, which need not be that of the module."""
    extra: str
    """Of lockstep, which installs it."""
    at_least: str
    """The oldest version."""
    below: str | None = None
    """The first version that is too new; None: none is known to be."""

    @property
    def range(self) -> str:
        """The versions as pip writes them."""
        return f">={self.at_least}" + (f",<{self.below}" if self.below else "")

    def require(self, asked_by: str) -> None:
        """Check that it is installed, in a version that will do.

        Args:
            asked_by: what needs it, as messages name it.

        Raises:
            UsageError: it is not; the line says what to install.
        """
        mend = f"install it with: pip install 'lockstep-rl[{self.extra}]'"
        try:
            found = version(self.name)
        except PackageNotFoundError:
            raise UsageError(f"{asked_by} needs {self.name}, not installed here; {mend}") from None
        below = f", below {self.below}" if self.below else ""
        if _key(found) < _key(self.at_least) or (self.below and _key(found) >= _key(self.below)):
            raise UsageError(
                f"{asked_by} needs {self.name} from {self.at_least} on{below}, and {found} is here; {mend}"
            )


def _key(text: str) -> tuple[int, ...]:
    """Return a version's release number; what comes after it (``rc1``, ``+cpu``) decides nothing here."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    while numbers and not numbers[-1]:  # 1.0 is 1
        numbers.pop()
    return tuple(numbers)
