"""Kinds of data in vectors, as JSON Schemas."""

HEX = {"type": "string", "pattern": "^([0-9a-f]{2})*$"}
RUNS = {"type": "array", "items": {"type": "array"}}
BYTES = {"anyOf": [HEX, RUNS], "description": "hex, or [[hex, count], ...]"}
TEXT = {"type": "string"}
INT = {"type": "integer"}
NUMBER = {"type": "number"}
BOOL = {"type": "boolean"}
VALUE = {"description": "a tagged value"}
REFUSED = {"const": True, "description": "to be refused, with any code"}
RELEASES = {"type": "object", "description": "libraries, and the releases whose work this is"}
CODE = {"type": "string", "pattern": "^[a-z-]+$"}
TEXTS = {"type": "array", "items": TEXT}
INTS = {"type": "array", "items": INT}
NUMBERS = {"type": "array", "items": NUMBER}
OBJECT = {"type": "object"}
OBJECTS = {"type": "array", "items": OBJECT}
FIGURE = {"anyOf": [NUMBER, {"const": None}], "description": "null: no number"}
