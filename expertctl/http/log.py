r"""The log: one JSON object a line, on stderr.

Nothing that a client sends can begin a new line, colour a terminal, or leave a secret: text is
ASCII with escapes, bounded, and tokens are cut out. Queries and headers are not logged at all.
"""

import json
import logging
import logging.config
import re
from datetime import UTC, datetime
from typing import Any

MAX_TEXT = 500
_SECRET = re.compile(r"(xp[tsk]_|Bearer\s+|Basic\s+)[\w.~+/=-]{4,}", re.IGNORECASE)


class JsonFormatter(logging.Formatter):
    """Writes a record and the fields that came with it as one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of one record."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": safe(record.getMessage()),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line |= {k: safe(v) if isinstance(v, str) else v for k, v in fields.items()}
        if record.exc_info:
            line["traceback"] = _SECRET.sub(r"\1***", self.formatException(record.exc_info))
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")


def safe(text: str) -> str:
    """Return a text without tokens, and bounded."""
    shown = _SECRET.sub(r"\1***", text)
    return shown if len(shown) <= MAX_TEXT else f"{shown[:MAX_TEXT]}…"


def log_config(*names: str) -> dict[str, Any]:
    """Return the settings that send what these loggers say, and granian's troubles, to stderr."""
    levels = {**dict.fromkeys(names, "INFO"), "_granian": "WARNING"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonFormatter}},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "json",
                "stream": "ext://sys.stderr",
            }
        },
        "loggers": {
            name: {"handlers": ["stderr"], "level": level, "propagate": False}
            for name, level in levels.items()
        },
    }


def configure_log(config: dict[str, Any]) -> None:
    """Send the log of this process where the settings say."""
    logging.config.dictConfig(config)
