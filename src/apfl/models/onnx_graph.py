"""A model as an ONNX graph, for runtimes without Python: rows of features in, classes, scores and probabilities out.

    features  float32 (rows, l)  ->  class          text, '' without a decision; without class names its index, or -1
                                     scores         float64 (rows, c)
                                     probabilities  float64 (rows, c), softmax(scores / temperature)

The graph computes in float64, because a ridge with little weight has large coefficients. onnxruntime has no float64
erf and arccos: gelu is good to 1e-7, and the arccosine is corrected by one step of Newton's method.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError, optional
from apfl.files import replacing
from apfl.maths.landmarks import LandmarkMap
from apfl.maths.lifts import Buckets, Lift, Products
from apfl.maths.maps import FeatureMap
from apfl.maths.normalise import WITH_CONSTANT, Normaliser
from apfl.models.additive import AdditiveModel
from apfl.models.base import ClientModel
from apfl.models.dual_stream import DualStream
from apfl.models.landmark import LandmarkModel
from apfl.models.linear_head import LinearHead
from apfl.models.predict import HALF
from apfl.models.residual import ResidualBlocks

__all__ = ["write_onnx"]

OPSET, IR = 17, 8  # of 2022: old enough for runtimes in the field
LARGEST = 2**31 - 2**20  # bytes of a protobuf, with room for the graph itself
AnyModel = AdditiveModel | DualStream | LandmarkModel | LinearHead | ResidualBlocks


def write_onnx(model: ClientModel, path: str | Path) -> None:
    """Write the model as an ONNX file."""
    onnx = optional("onnx", "onnx")
    if not isinstance(model, AnyModel):
        raise InputError(f"{type(model).__name__} given, which has no ONNX graph; save it as safetensors")
    made = _model_proto(onnx, model)
    onnx.checker.check_model(made)
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(made.SerializeToString())


def _model_proto(onnx: Any, model: AnyModel) -> Any:
    graph, names = _Graph(onnx), model.class_names
    rows = graph("Cast", "features", to=onnx.TensorProto.DOUBLE)
    scores = graph("Identity", _scores(graph, model, rows), out="scores")
    target = model.about.get("target", "classification")
    if target != "classification":
        return _targets_proto(onnx, graph, model, scores, target)
    tempered = graph("Div", scores, graph.number(getattr(model, "temperature", None) or 1.0))
    graph("Softmax", tempered, axis=1, out="probabilities")
    _classes(graph, model, rows, scores)
    kind, n = "INT64" if names is None else "STRING", _n_classes(model)
    outputs: list[tuple[str, str, list[Any]]] = [("class", kind, ["rows"]), ("scores", "DOUBLE", ["rows", n])]
    outputs.append(("probabilities", "DOUBLE", ["rows", n]))
    return _proto(onnx, graph, model, outputs)


def _targets_proto(onnx: Any, graph: _Graph, model: AnyModel, scores: str, target: str) -> Any:
    """Of numbers or several labels: ``predicted`` (n, c) in place of a class."""
    if target == "regression":
        std, mean = (model.about.get(f"target_{each}") for each in ("std", "mean"))
        scaled = scores if std is None else graph("Mul", scores, graph.constant(np.array(std, np.float64)))
        shifted = scaled if mean is None else graph("Add", scaled, graph.constant(np.array(mean, np.float64)))
        graph("Identity", shifted, out="predicted")
    else:
        above = graph("Greater", scores, graph.number(HALF))
        graph("Cast", above, to=onnx.TensorProto.INT64, out="predicted")
    kind, n = "DOUBLE" if target == "regression" else "INT64", _n_classes(model)
    return _proto(onnx, graph, model, [("predicted", kind, ["rows", n]), ("scores", "DOUBLE", ["rows", n])])


def _proto(onnx: Any, graph: _Graph, model: AnyModel, outs: Sequence[tuple[str, str, list[Any]]]) -> Any:
    if graph.bytes > LARGEST:
        raise InputError(f"the model has {graph.bytes / 1e9:.1f} GB; an ONNX file holds 2 GB: use a smaller width")
    kinds, info = onnx.TensorProto, onnx.helper.make_tensor_value_info
    outputs = [info(name, getattr(kinds, kind), shape) for name, kind, shape in outs]
    features = info("features", kinds.FLOAT, ["rows", _n_features(model)])
    made = onnx.helper.make_model(
        onnx.helper.make_graph(graph.nodes, "apfl", [features], outputs, graph.constants),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR, producer_name="apfl",
        producer_version=version("apfl"),
    )  # fmt: skip
    onnx.helper.set_model_props(made, _about(model))
    return made


def _about(model: AnyModel) -> dict[str, str]:
    """What the file says about the model, as the header of a safetensors file does."""
    temperature = getattr(model, "temperature", None)
    return {
        "kind": model.kind,
        "class_names": json.dumps(None if model.class_names is None else list(model.class_names)),
        "temperature": "none: probabilities are not calibrated" if temperature is None else str(temperature),
        "about": json.dumps(dict(model.about), sort_keys=True),
    }


class _Graph:
    """The nodes and constants so far; calling it adds a node and gives the name of its output."""

    def __init__(self, onnx: Any) -> None:
        self.onnx, self.nodes, self.constants, self.bytes = onnx, list[Any](), list[Any](), 0

    def __call__(self, operator: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        out = out or f"{operator}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(operator, list(inputs), [out], **attributes))
        return out

    def constant(self, values: Any) -> str:
        """An array as it is."""
        array = np.ascontiguousarray(values)
        self.bytes += array.nbytes
        self.constants.append(self.onnx.numpy_helper.from_array(array, f"constant_{len(self.constants)}"))
        return f"constant_{len(self.constants) - 1}"

    def tensor(self, values: Tensor) -> str:
        """A tensor, stored in its own precision and used in float64."""
        stored = self.constant(values.detach().cpu().numpy())
        return stored if values.dtype == torch.float64 else self("Cast", stored, to=self.onnx.TensorProto.DOUBLE)

    def number(self, value: float) -> str:
        return self.constant(np.float64(value))

    def single(self, operator: str, value: str) -> str:
        """An operator that runtimes have in float32 only."""
        low = self("Cast", value, to=self.onnx.TensorProto.FLOAT)
        return self("Cast", self(operator, low), to=self.onnx.TensorProto.DOUBLE)


def _n_features(model: AnyModel) -> int:
    if isinstance(model, AdditiveModel):
        return len(model.linear)
    if isinstance(model, DualStream):
        n_in = model.primary_map.n_in
    elif isinstance(model, ResidualBlocks):
        n_in = model.first.n_in
    elif model.feature_map is not None:
        n_in = model.feature_map.n_in
    else:
        assert isinstance(model, LinearHead), "a landmark model has a map"
        n_in = len(model.weight if model.base_weight is None else model.base_weight)
    return n_in - model.normaliser.width(0)


def _n_classes(model: AnyModel) -> int:
    names = {"dual-stream": "primary", "landmark-stream": "weights", "linear-head": "weight", "additive": "linear"}
    return int(getattr(model, names.get(model.kind, "weight")).shape[1])


def _additive(graph: _Graph, model: AdditiveModel, rows: str) -> str:
    n = len(model.linear)
    z = _normalised(graph, model.normaliser, rows, n)
    scores = graph("Add", graph("MatMul", z, graph.tensor(model.linear)), graph.tensor(model.intercept))
    if model.landmarks is None or model.scaling is None or model.kernel is None:
        return scores
    near = _kernel(graph, model.landmarks, _normalised(graph, model.scaling, rows, n))
    return graph("Add", scores, graph("MatMul", near, graph.tensor(model.kernel)))


def _scores(graph: _Graph, model: AnyModel, rows: str) -> str:
    """The scores of the model, without its classes."""
    if isinstance(model, AdditiveModel):
        return _additive(graph, model, rows)
    z = _normalised(graph, model.normaliser, rows, _n_features(model))
    if isinstance(model, LinearHead):
        return _head(graph, model, z)
    if isinstance(model, ResidualBlocks):
        return _blocks(graph, model, z)
    if isinstance(model, LandmarkModel):
        scores = graph("MatMul", _kernel(graph, model.feature_map, z), graph.tensor(model.weights))
    else:
        scores = _streams(graph, model, z)
    return scores if model.prior is None else graph("Add", scores, graph.tensor(model.prior))


def _streams(graph: _Graph, model: DualStream, z: str) -> str:
    scores = graph("MatMul", _mapped(graph, model.primary_map, z), graph.tensor(model.primary))
    if model.refinement is None or model.refinement_map is None or not model.balance:
        return scores
    weighted = graph.tensor(model.balance * model.refinement)
    return graph("Add", scores, graph("MatMul", _mapped(graph, model.refinement_map, z), weighted))


def _head(graph: _Graph, model: LinearHead, rep: str) -> str:
    if isinstance(model.feature_map, FeatureMap):
        rep = _mapped(graph, model.feature_map, rep)
    elif model.feature_map is not None:
        rep = _lifted(graph, model.feature_map, rep)
    if model.base_weight is not None and model.base_bias is not None:
        adapted = graph("MatMul", rep, graph.tensor(model.base_weight))
        rep = graph("Relu", graph("Add", adapted, graph.tensor(model.base_bias)))
    if model.unit:
        rep = graph("Div", rep, graph("Max", _length(graph, rep), graph.number(1e-12)))  # torch's normalize
    if model.offset is not None:
        rep = graph("Add", rep, graph.tensor(model.offset))
    return graph("Add", graph("MatMul", rep, graph.tensor(model.weight)), graph.tensor(model.bias))


def _blocks(graph: _Graph, model: ResidualBlocks, z: str) -> str:
    hidden = _mapped(graph, model.first, z)
    for feature_map, block in zip(model.maps, model.blocks, strict=True):
        step = graph("MatMul", _mapped(graph, feature_map, hidden), graph.tensor(block))
        hidden = graph("Add", hidden, step)
    return graph("Add", graph("MatMul", hidden, graph.tensor(model.weight)), graph.tensor(model.bias))


def _length(graph: _Graph, rows: str) -> str:
    return graph("ReduceL2", rows, axes=[1], keepdims=1)


def _to_length(graph: _Graph, rows: str, length: float) -> str:
    """Every row at this length; a row of zeros stays one."""
    scale = graph("Div", graph.number(length), graph("Max", _length(graph, rows), graph.number(np.finfo(float).tiny)))
    return graph("Mul", rows, scale)


def _with_column(graph: _Graph, rows: str, value: float) -> str:
    return graph("Pad", rows, graph.constant(np.array([0, 0, 0, 1])), graph.number(value))


def _normalised(graph: _Graph, normaliser: Normaliser, rows: str, n_features: int) -> str:
    """`Normaliser.__call__`. Squares of float32 numbers neither overflow nor vanish in float64."""
    length = math.sqrt(n_features)
    if normaliser.how in ("root", "centred"):
        rows = _to_length(graph, graph("Mul", graph("Sign", rows), graph("Sqrt", graph("Abs", rows))), length)
    if normaliser.mean is not None and normaliser.std is not None:
        rows = graph("Div", graph("Sub", rows, graph.tensor(normaliser.mean)), graph.tensor(normaliser.std))
    if normaliser.how in WITH_CONSTANT:
        return _to_length(graph, _with_column(graph, rows, length), math.sqrt(n_features + 1))
    return _to_length(graph, rows, length) if normaliser.how == "row" else rows


def _mapped(graph: _Graph, feature_map: FeatureMap, z: str) -> str:
    """`FeatureMap.__call__`."""
    if feature_map.matrix is not None:
        matrix = graph.tensor(feature_map.matrix.float())  # drawn in float32
        if feature_map.offset is not None:  # onnxruntime would fuse a factor of the product, and round it to float32
            matrix = graph("Mul", matrix, graph.number(feature_map.scale))
        z = graph("MatMul", z, matrix)
        if feature_map.offset is not None:
            z = graph("Add", z, graph.tensor(feature_map.offset.float()))
        z = _ACTIVATIONS[feature_map.activation](graph, z)
    return _with_column(graph, z, 1.0) if feature_map.intercept else z


def _lifted(graph: _Graph, lift: Lift, z: str) -> str:
    """`Products.__call__` or `Buckets.__call__`."""
    if isinstance(lift, Products):
        left, right = (graph("Gather", z, graph.constant(i.numpy()), axis=1) for i in lift.factors)
        return graph("Concat", z, graph("Mul", left, right), axis=1)
    return _one_hot_groups(graph, lift, z)


def _one_hot_groups(graph: _Graph, lift: Buckets, z: str) -> str:
    (groups, bits), (columns, thresholds) = lift.shape, lift.chosen
    double, whole = graph.onnx.TensorProto.DOUBLE, graph.onnx.TensorProto.INT64
    on = graph("Greater", graph("Gather", z, graph.constant(columns.numpy()), axis=1), graph.tensor(thresholds))
    grouped = graph("Reshape", graph("Cast", on, to=double), graph.constant(np.array([0, groups, bits])))
    valued = graph("Mul", grouped, graph.constant(2.0 ** np.arange(bits)))
    place = graph("ReduceSum", valued, graph.constant(np.array([2])), keepdims=0)  # (n, groups)
    ends = graph.constant(np.array([0.0, 1.0], dtype=np.float32))  # runtimes have it in float32 only
    hot = graph("OneHot", graph("Cast", place, to=whole), graph.constant(np.int64(2**bits)), ends, axis=-1)
    return graph("Reshape", graph("Cast", hot, to=double), graph.constant(np.array([0, lift.width])))


def _gelu(graph: _Graph, x: str) -> str:
    bell = graph("Add", graph.single("Erf", graph("Mul", x, graph.number(math.sqrt(0.5)))), graph.number(1.0))
    return graph("Mul", graph("Mul", x, graph.number(0.5)), bell)


def _hardswish(graph: _Graph, x: str) -> str:
    gate = graph("Add", graph("Div", x, graph.number(6.0)), graph.number(0.5))
    return graph("Mul", x, graph("Clip", gate, graph.number(0.0), graph.number(1.0)))


_ACTIVATIONS: dict[str, Callable[[_Graph, str], str]] = {
    "relu": lambda graph, x: graph("Relu", x),
    "leaky_relu": lambda graph, x: graph("LeakyRelu", x, alpha=0.01),
    "gelu": _gelu,
    "tanh": lambda graph, x: graph("Tanh", x),
    "sigmoid": lambda graph, x: graph("Sigmoid", x),
    "hardswish": _hardswish,
    "softshrink": lambda graph, x: graph("Sub", x, graph("Clip", x, graph.number(-0.5), graph.number(0.5))),
    "identity": lambda graph, x: x,
    "cosine": lambda graph, x: graph("Cos", x),
}


def _kernel(graph: _Graph, landmarks: LandmarkMap, z: str) -> str:
    """`apfl.maths.landmarks.kernel` of rows at length one: (sin t + (pi - t) cos t) / pi, zero for a row of zeros."""
    one, zero = graph.number(1.0), graph.number(0.0)
    transposed = graph("Transpose", graph.tensor(landmarks.landmarks), perm=[1, 0])
    product = graph("MatMul", _to_length(graph, z, 1.0), transposed)
    cosine = graph("Clip", product, graph.number(-1.0), one)
    sine = graph("Sqrt", graph("Mul", graph("Sub", one, cosine), graph("Add", one, cosine)))
    beyond = graph("Sub", graph.number(math.pi), _angle(graph, cosine, sine))
    values = graph("Div", graph("Add", sine, graph("Mul", beyond, cosine)), graph.number(math.pi))
    return graph("Where", graph("Greater", _length(graph, z), zero), values, zero)


def _angle(graph: _Graph, cosine: str, sine: str) -> str:
    """t in float64: the arccosine t' in float32, and asin(sin(t - t')) = d + d^3 / 6 with |d| < 1e-3."""
    near = graph.single("Acos", cosine)
    turned = (graph("Mul", sine, graph("Cos", near)), graph("Mul", cosine, graph("Sin", near)))
    off = graph("Sub", *turned)
    cube = graph("Div", graph("Mul", off, graph("Mul", off, off)), graph.number(6.0))
    return graph("Add", near, graph("Add", off, cube))


def _classes(graph: _Graph, model: AnyModel, rows: str, scores: str) -> None:
    """The class of the highest score; none for a row that `apfl.models.undecided` gives a reason for."""
    ruled_out = graph("Equal", scores, graph.number(-math.inf))
    highest = graph("ReduceMax", scores, axes=[1], keepdims=0)
    lowest = graph("ReduceMin", graph("Where", ruled_out, graph.number(math.inf), scores), axes=[1], keepdims=0)
    reasons = [
        graph(
            "And", graph("Equal", highest, lowest), graph("Greater", _count(graph, "Not", ruled_out), graph.number(1))
        ),
        graph("Greater", _count(graph, "IsNaN", scores), graph.number(0.0)),
        graph("IsInf", highest),
    ]
    if model.normaliser.how in ("row", "root"):
        size = graph("ReduceMax", graph("Abs", rows), axes=[1], keepdims=0)
        reasons.append(graph("Equal", size, graph.number(0.0)))
    undecided = reasons[0]
    for reason in reasons[1:]:
        undecided = graph("Or", undecided, reason)
    best = graph("ArgMax", scores, axis=1, keepdims=0)
    n = _n_classes(model)
    if model.class_names is None:
        graph("Where", undecided, graph.constant(np.int64(-1)), best, out="class")
    else:
        names = graph.constant(np.array([*model.class_names, ""], dtype=object))
        graph("Gather", names, graph("Where", undecided, graph.constant(np.int64(n)), best), out="class")


def _count(graph: _Graph, operator: str, values: str) -> str:
    """In how many columns the operator says true."""
    numbers = graph("Cast", graph(operator, values), to=graph.onnx.TensorProto.DOUBLE)
    return graph("ReduceSum", numbers, graph.constant(np.array([1])), keepdims=0)
