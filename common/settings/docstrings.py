"""The texts below the fields of a struct, for pages and explanations that are generated from them."""

import ast
import inspect
from functools import cache
from itertools import pairwise

import msgspec


@cache
def field_docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the text below each field of a struct, its lines joined."""
    tree = ast.parse(inspect.getsource(struct))
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    found: dict[str, str] = {}
    for attribute, text in pairwise(definition.body):
        match attribute, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                found[name] = " ".join(docstring.split())
    return found
