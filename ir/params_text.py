"""From the parameters of a jaxpr equation to values that can be printed, compared and parsed back.

Nearly all parameters of real steps are Python literals. The rest are a handful of kinds, one codec
each: dtypes and enums become `Symbol`s, dimension numbers and other named tuples `Record`s, types
`Aval`s, nested jaxprs `Graph`s. What cannot be text (a callable, a placed sharding) becomes a
`Handle`, which keeps the object but prints only its name.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from hetjax.ir.dtypes import short_dtype
from hetjax.ir.graph import Aval, Graph, Handle, Record, Symbol

# Arrays up to this many elements are written out; larger ones stay behind a handle.
MAX_ARRAY_SIZE = 64

ImportGraph = Callable[[Any, str], Graph]

# JAX's marker for "no sharding given", recognised by the name of its type.
_UNSPECIFIED = "UnspecifiedValue"


def encode_param(name: str, value: Any, import_graph: ImportGraph) -> Any:
    """Returns the textable form of one equation parameter.

    Args:
      name: the parameter's name; nested graphs are called after it.
      value: what the equation holds.
      import_graph: turns a nested jaxpr into a graph, given the jaxpr (`ClosedJaxpr` or `Jaxpr`)
        and a name for it.

    Returns:
      A Python literal, `tuple`, `Symbol`, `Record`, `Aval`, `Graph` or `Handle`. Equal parameters
      give equal forms, in every process: no memory address enters a name. Every NaN is the one
      object `math.nan`, so that tuples that hold it compare equal.
    """

    def encode(value: Any, name: str) -> Any:
        # Enums come first: an IntEnum member is an int too.
        if isinstance(value, enum.Enum):
            return Symbol(f"{type(value).__name__}.{value.name}")
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, (int, float, complex, np.generic)):
            return _scalar(value)
        if type(value) in (tuple, list):
            return tuple(encode(v, f"{name}.{i}") for i, v in enumerate(value))
        kind = type(value).__name__
        if kind in ("ClosedJaxpr", "Jaxpr"):
            return import_graph(value, name)
        if (whole := _encode_whole(kind, value)) is not None:
            return whole
        if (fields := _fields(kind, value)) is not None:
            kind = "PartitionSpec" if kind == "P" else kind
            return Record(kind, tuple((k, encode(v, f"{name}.{k}")) for k, v in fields))
        return Handle(handle_name(value), value)

    return encode(value, name)


def _encode_whole(kind: str, value: Any) -> Any:
    """The form of a value that has no parts to encode, or None."""
    if (dtype := dtype_name(value)) is not None:
        return Symbol(dtype)
    if kind == "PRNGImpl":
        return Symbol(f"PRNG.{value.name}")
    if kind == _UNSPECIFIED:
        return Symbol(_UNSPECIFIED)
    if kind in ("Mesh", "AbstractMesh") and value.empty:
        return Symbol(f"{kind}.empty")
    if kind == "ShapedArray":
        dtype = dtype_name(value.dtype) or str(value.dtype)
        return Aval(dtype, tuple(value.shape), bool(value.weak_type))
    return _small_array(kind, value)


def _scalar(value: Any) -> Any:
    item = value.item() if isinstance(value, np.generic) else value
    if isinstance(item, (bool, str)):
        return item
    # JAX's typed scalars are subclasses of int and float; plain ones compare and print the same everywhere.
    if isinstance(item, int):
        return int(item)
    if isinstance(item, complex):
        return complex(item)
    item = float(item)  # a bfloat16 item is still an ml_dtypes scalar
    return math.nan if math.isnan(item) else item


def dtype_name(value: Any) -> str | None:
    """Returns the short name of a dtype in any of the shapes JAX holds them; None for what is no dtype."""
    if isinstance(value, np.dtype):
        return "float0" if value.names == ("float0",) else short_dtype(value.name)
    if isinstance(value, type):
        if issubclass(value, np.generic):
            return short_dtype(np.dtype(value).name)
        # jnp.float32 and its like are classes of a metaclass that names the dtype.
        dtype = value.__dict__.get("dtype")
        return short_dtype(dtype.name) if isinstance(dtype, np.dtype) else None
    if type(value).__name__ == "KeyTy":
        return value.name
    return None


def _fields(kind: str, value: Any) -> list[tuple[str, Any]] | None:
    """Names and values of what is a plain record of other values, else None."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return None if names is None else [(n, getattr(value, n)) for n in names]
    if kind == "PartitionSpec" or (kind == "P" and type(value).__module__.startswith("jax")):
        return [("partitions", tuple(value))]
    if isinstance(value, slice):
        return [("start", value.start), ("stop", value.stop), ("step", value.step)]
    if isinstance(value, (set, frozenset)):
        try:
            return [("items", tuple(sorted(value)))]
        except TypeError:
            return None
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return [("items", tuple(sorted(value.items())))]
    if kind == "_FlatCallback":
        return None
    if kind == "RaggedDotDimensionNumbers":
        names = ("dot_dimension_numbers", "lhs_ragged_dimensions", "rhs_group_dimensions")
        return [(n, getattr(value, n)) for n in names]
    if (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and type(value).__module__.split(".")[0] in ("jax", "jaxlib")
    ):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _small_array(kind: str, value: Any) -> Record | None:
    if isinstance(value, np.ndarray) or kind == "ArrayImpl":
        dtype = dtype_name(value.dtype)
        if dtype is None or dtype.startswith("key<") or value.size > MAX_ARRAY_SIZE:
            return None
        flat = np.asarray(value).reshape(-1)
        return Record(
            "array",
            (
                ("dtype", Symbol(dtype)),
                ("shape", tuple(value.shape)),
                ("data", tuple(_scalar(x) for x in flat)),
            ),
        )
    return None


def handle_name(value: Any) -> str:
    """Returns a readable name for a value that is not text; the same in every process.

    Args:
      value: a callable, a sharding, a mesh, or anything else.

    Returns:
      For callables the qualified name ("step.loss", "step.lambda"), for shardings and meshes their
      axes and partitions, for the rest the type's name.
    """
    kind = type(value).__name__
    if isinstance(value, functools.partial):
        return handle_name(value.func)
    if kind == "WrappedFun":
        return handle_name(value.f)
    if kind == "_FlatCallback":
        return handle_name(value.callback_func)
    if kind == "NamedSharding":
        spec = ",".join(_axes_text(p) for p in value.spec)
        return f"NamedSharding({_mesh_text(value.mesh)};{spec})"
    if kind in ("Mesh", "AbstractMesh"):
        return f"{kind}({_mesh_text(value)})"
    if kind in ("PyTreeDef", "SingleDeviceSharding"):
        return _without_addresses(str(value))
    if isinstance(value, np.ndarray) or kind == "ArrayImpl":
        return f"array({short_dtype(str(value.dtype))}[{','.join(map(str, value.shape))}])"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if isinstance(name, str):
        return name.replace("<locals>.", "").replace("<lambda>", "lambda")
    return kind


def _axes_text(partition: Any) -> str:
    if partition is None:
        return "-"
    return "*".join(map(str, partition)) if isinstance(partition, tuple) else str(partition)


def _mesh_text(mesh: Any) -> str:
    return ",".join(f"{a}={n}" for a, n in zip(mesh.axis_names, mesh.axis_sizes))


def _without_addresses(text: str) -> str:
    return re.sub(r"( at )?0x[0-9a-fA-F]+", "", text)
