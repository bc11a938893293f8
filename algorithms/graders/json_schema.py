"""JsonSchema: whether a response is JSON, and what a schema asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import pydantic

from . import extraction
from .grader import Grader

_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


class JsonSchema(Grader):
    """1 when the response is JSON that a schema accepts, otherwise 0. The JSON may stand in a fenced block, or after the reasoning.

    With `json_schema={}` any JSON will do.
    """

    is_verdict: ClassVar[bool] = True

    json_schema: Mapping[str, Any]
    """A JSON Schema, of the draft that its `$schema` names; without one, draft 2020-12. Give it; there is no default."""

    @pydantic.field_validator("json_schema")
    @classmethod
    def _is_schema(cls, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        import jsonschema
        from jsonschema.validators import validator_for

        try:
            validator_for(schema).check_schema(dict(schema))
        except jsonschema.SchemaError as error:
            raise ValueError(f"it is no JSON Schema: {error.message} at {error.json_path}") from None
        return schema

    @cached_property
    def _validator(self) -> Any:
        from jsonschema.validators import validator_for

        return validator_for(self.json_schema)(self.json_schema)

    def __call__(self, response: str) -> float:
        """Check a response.

        >>> person = JsonSchema(json_schema={"type": "object", "required": ["name"]})
        >>> person('{"name": "Ada"}'), person('{"age": 36}'), person("Ada")
        (1.0, 0.0, 0.0)
        """
        text = extraction.without_tag(extraction.without_reasoning(response)).strip()
        fenced = _FENCE.findall(text)
        try:
            value = json.loads(fenced[-1] if fenced else text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return 0.0
        return float(self._validator.is_valid(value))


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")
