"""Reads answers and events as Anthropic's own types. stdin: {"answers", "events", "errors"}, each a list."""

import json
import sys

from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

given = json.load(sys.stdin)
for answer in given["answers"]:
    Message.model_validate(answer)
for event in given["events"]:
    TypeAdapter(RawMessageStreamEvent).validate_python(event)
for error in given["errors"]:
    ErrorResponse.model_validate(error)
