"""The operator's settings: one environment variable each, so that a chart value, a shell and a test set them alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Self

from foremoe_operator.core.model import Limits

PREFIX: Final = "FOREMOE_OPERATOR_"


class SettingsError(ValueError):
    """A setting has no meaning; the message names the environment variable."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be set. The environment variable of a field is FOREMOE_OPERATOR_ and its name in capitals."""

    namespaces: tuple[str, ...] = field(
        default=(), metadata={"text": "Comma-separated namespaces to serve; empty: all of them."}
    )
    listen_host: str = field(default="0.0.0.0", metadata={"text": "Address for /healthz and /metrics."})
    health_port: int = field(default=8080, metadata={"text": "Port of /healthz."})
    metrics_port: int = field(default=9090, metadata={"text": "Port of /metrics."})
    workers: int = field(default=8, metadata={"text": "Jobs looked at at once; each look waits for the API server."})
    poll_seconds: float = field(
        default=Limits.poll_seconds,
        metadata={"text": "How often a running job's head is asked; progress shown is at most this old."},
    )
    head_silence_seconds: float = field(
        default=Limits.head_silence_seconds,
        metadata={"text": "A head whose agent and probe both fail this long is given up."},
    )
    log_format: str = field(default="text", metadata={"text": "text or json."})
    log_level: str = field(default="INFO", metadata={"text": "DEBUG, INFO, WARNING or ERROR."})

    @property
    def limits(self) -> Limits:
        """The operator's patience, for the core."""
        return Limits(poll_seconds=self.poll_seconds, head_silence_seconds=self.head_silence_seconds)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read all settings; raises SettingsError naming the variable that cannot be read."""
        values: dict[str, object] = {}
        for each in fields(cls):
            name = PREFIX + each.name.upper()
            if name in environment:
                values[each.name] = _read(name, environment[name], each.default)
        settings = cls(**values)  # type: ignore[arg-type]  # _read keeps each default's type
        settings._check()
        return settings

    def _check(self) -> None:
        for name in ("workers", "poll_seconds", "head_silence_seconds"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{PREFIX}{name.upper()}: must be above 0")
        if self.log_format not in ("text", "json"):
            raise SettingsError(f"{PREFIX}LOG_FORMAT: must be text or json, not {self.log_format!r}")
        if self.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise SettingsError(f"{PREFIX}LOG_LEVEL: must be DEBUG, INFO, WARNING or ERROR, not {self.log_level!r}")


def _read(name: str, text: str, default: object) -> object:
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if isinstance(default, str):
        return text
    try:
        return int(text) if isinstance(default, int) else float(text)
    except ValueError:
        raise SettingsError(f"{name}: a number is expected, not {text!r}") from None


def describe() -> str:
    """All settings with variable, default and meaning, one a line."""
    lines = []
    for each in fields(Settings):
        default = ",".join(each.default) if isinstance(each.default, tuple) else each.default
        lines.append(f"  {PREFIX + each.name.upper():40} {each.metadata['text']} [{default}]")
    return "\n".join(lines)
