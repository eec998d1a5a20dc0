"""Operations known to the TensorFlow versions of TF Serving, and a check of SavedModels.

    python -m tests.export.serving_operations 2.12=PYTHON 2.20=PYTHON

writes serving_operations.json. Each PYTHON is an interpreter with the TensorFlow and TF Text that
servers of that generation are linked with:

    pip install tensorflow==2.12.1 tensorflow-text==2.12.1 'numpy<1.24'
    pip install tensorflow==2.20.0 tensorflow-text==2.20.0

The list holds the operations of our exports and similar ones, so that a new operation rarely
requires the old TensorFlow versions again.
"""

import json
import pathlib
import re
import subprocess
import sys

from tensorflow.core.framework import op_def_pb2, types_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.client import pywrap_tf_session

LIST = pathlib.Path(__file__).with_suffix(".json")
SERVERS = {
    "2.12": "TF Serving 2.12.1 to 2.19.1, all with TF Text 2.12.1",
    "2.20": "TF Serving 2.20.0, with TF Text 2.20.0",
}
LISTED = re.compile(
    # Only this one of TF Text: servers link fewer of its operations than the package has.
    r"FastWordpieceTokenizeWithOffsets|"
    # Variables and their files.
    r"(Var|Read|Assign)\w*VariableOp|VarHandleOp|DisableCopyOnRead|SaveV2|RestoreV2|"
    r"MergeV2Checkpoints|ShardedFilename|"
    # Functions, loops and lists.
    r"(Stateful)?PartitionedCall|(Stateless)?(If|While|Case)|TensorList\w+|TensorArray\w*V3|"
    # Strings and ragged rows.
    r"String\w+|Decode\w*Raw|StaticRegex\w+|Substr|Unicode\w+|AsString|Ragged\w+|"
    # Shapes and positions.
    r"Const|Placeholder|NoOp|Identity\w*|Assert|Cast|Bitcast|Shape\w*|Size|Rank|Reshape|Squeeze|"
    r"ExpandDims|EnsureShape|Pack|Unpack|Concat\w*|Split\w*|Slice|StridedSlice|Tile|Fill|BroadcastTo|Pad\w*|"
    r"Transpose|Gather\w*|Scatter\w*|TensorScatter\w*|Where|Select\w*|Range|OneHot|Unique\w*|TopK\w*|"
    r"ReverseV2|ReverseSequence|InvertPermutation|LowerBound|UpperBound|(Zeros|Ones)Like|"
    # Numbers.
    r"Add\w*|Sub|Mul|Neg|RealDiv|Div\w*|Floor\w*|Maximum|Minimum|Square\w*|Sqrt|Rsqrt|Pow|Exp|Log\w*|"
    r"Erfc?|Tanh|Sigmoid|Relu|Abs|Sign|Round|Greater\w*|Less\w*|Equal|NotEqual|Bitwise\w+|"
    r"(Left|Right)Shift|All|Any|Max|Min|Mean|Prod|Sum|Arg\w+|Cumsum|Cumprod|\w*Bincount|MaxPool|"
    r"(Unsorted)?Segment\w+|(Batch)?MatMul\w*|Einsum|BiasAdd|Softmax|FusedBatchNormV3|"
    r"_MklNativeFusedMatMul|_MklSoftmax|_MklLayerNorm"
)
LEFT_OUT = re.compile("Sparse|Grad")
# Attributes that older versions ignore with a log line, such as debug names of variables.
IGNORED = {("VarHandleOp", "debug_name")}
JSON_TYPES = {"bool", "string", "float", "double"} | {
    f"{sign}int{size}" for sign in ("", "u") for size in (8, 16, 32, 64)
}


def registered():
    """Return {operation: {attribute: {"type", "default", "allowed"}}} of this process."""
    data = pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList())
    return {
        operation.name: {attribute.name: _described(attribute) for attribute in operation.attr}
        for operation in op_def_pb2.OpList.FromString(data).op
    }


def of_servers():
    """Return {generation: what `registered` returned there} from the list."""
    return json.loads(LIST.read_text(encoding="ascii"))


def nodes_of(graph):
    """Yield every node of a GraphDef, including its functions."""
    return [
        *graph.node,
        *(node for function in graph.library.function for node in function.node_def),
    ]


def read(directory):
    """Return the MetaGraphDef of a SavedModel."""
    data = (pathlib.Path(directory) / "saved_model.pb").read_bytes()
    (meta_graph,) = saved_model_pb2.SavedModel.FromString(data).meta_graphs
    return meta_graph


def problems(directory):
    """Return sorted lines on what TF Serving would reject or run differently in a SavedModel."""
    meta_graph = read(directory)
    found = set(_of_signatures(meta_graph.signature_def))
    here = registered()
    for generation, there in of_servers().items():
        for node in nodes_of(meta_graph.graph_def):
            for problem in _of_node(node, here[node.op], there.get(node.op)):
                found.add(f"{generation}: {node.op}: {problem}")
    for function in meta_graph.graph_def.library.function:
        if function.attr["_XlaMustCompile"].b:
            found.add(f"{function.signature.name}: is compiled by XLA")
    return sorted(found)


def _of_node(node, here, there):
    if there is None:
        yield "no such operation in the list"
        return
    for name, value in node.attr.items():
        if name.startswith("_") or (node.op, name) in IGNORED:
            continue
        if name not in there:
            yield f"no attribute {name}"
        elif unknown := set(_values(value)) - set(there[name].get("allowed", _values(value))):
            yield f"no {name} = {', '.join(sorted(unknown))}"
    # Default values are omitted: each TensorFlow uses its own.
    for name in set(there) - set(node.attr):
        if there[name].get("default") is None or there[name]["default"] != here[name]["default"]:
            yield f"{name} has another default"


def _of_signatures(signatures):
    if "serving_default" not in signatures:
        yield "no signature serving_default"
    for signature, definition in signatures.items():
        if signature.startswith("__"):
            continue
        for name, tensor in (*definition.inputs.items(), *definition.outputs.items()):
            if _type(tensor.dtype) not in JSON_TYPES:
                yield f"{signature}: {name} is {_type(tensor.dtype)}, which JSON cannot say"
            if [size.size for size in tensor.tensor_shape.dim[:1]] != [-1]:
                yield f"{signature}: {name} does not begin with the rows of a request"
            if name.endswith("_bytes"):
                yield f"{signature}: {name} would be sent as base64"


def _described(attribute):
    described = {"type": attribute.type}
    if attribute.HasField("default_value"):
        described["default"] = attribute.default_value.SerializeToString(deterministic=True).hex()
    if attribute.HasField("allowed_values"):
        described["allowed"] = sorted(_values(attribute.allowed_values))
    return described


def _values(value):
    """Return the types and strings in the value of an attribute, the kinds that are restricted."""
    if value.HasField("type"):
        return [_type(value.type)]
    if value.HasField("s"):
        return [value.s.decode("utf-8", "replace")]
    return [
        *map(_type, value.list.type),
        *(text.decode("utf-8", "replace") for text in value.list.s),
    ]


def _type(number):
    return types_pb2.DataType.Name(number).removeprefix("DT_").lower()


def main(*interpreters):
    generations = {}
    for interpreter in interpreters:
        generation, python = interpreter.split("=", 1)
        done = subprocess.run([python, "-I", __file__], stdout=subprocess.PIPE, check=True)
        generations[generation] = json.loads(done.stdout)
    if sorted(generations) != sorted(SERVERS):
        sys.exit(f"expected an interpreter for each of {', '.join(SERVERS)}")
    parts = []
    for generation, operations in sorted(generations.items()):
        lines = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(attributes, sort_keys=True)}"
            for name, attributes in sorted(operations.items())
            if LISTED.fullmatch(name) and not LEFT_OUT.search(name)
        )
        parts.append(f" {json.dumps(generation)}: {{\n{lines}\n }}")
    LIST.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="ascii")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(*sys.argv[1:])
    else:  # This runs in an interpreter of a server's generation.
        import tensorflow_text  # noqa: F401  Registers its operations.

        json.dump(registered(), sys.stdout)
