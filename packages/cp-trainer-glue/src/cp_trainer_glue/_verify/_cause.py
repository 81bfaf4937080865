"""A likely cause, with the numbers that speak for it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One sentence, and why it is believed."""

    kind: str
    sentence: str
    evidence: str

    def as_json(self) -> dict[str, str]:
        """Return it as plain content."""
        return {"kind": self.kind, "sentence": self.sentence, "evidence": self.evidence}
