"""Run a command of bert_tf by its name.

    bert-tf finetune --task=classification --train=train.csv --init_from=DIR --output_dir=RUN

The same as `python -m tasks.finetune`, but files of the working directory, such as a tasks.py, do
not hide the packages.
"""

import ast
import importlib.util
import pathlib
import runpy
import sys

from bert_tf.system import command
from bert_tf.system.versions import versions

PROGRAM = "bert-tf"
# In the order of their use. These are names, since bert_tf imports nothing from the others.
COMMANDS = (
    "bert_tf.learn_vocab",
    "bert_tf.write_shards",
    "bert_tf.inspect_shards",
    "bert_tf.plan",
    "bert_tf.pretrain",
    "bert_tf.convert",
    "bert_tf.fill_mask",
    "bert_tf.plot_attention",
    "tasks.finetune",
    "tasks.evaluate",
    "tasks.predict",
    "tasks.extract",
    "tasks.search",
    "tasks.mine_negatives",
    "export.export_saved_model",
    "export.export_litert",
    "export.request",
)
MODULES = {module.rpartition(".")[2]: module for module in COMMANDS}
PACKAGES = ("bert_tf", "tensorflow", "tensorflow-text", "keras")


def main() -> None:
    """Run the command that the first argument names, with the arguments after it."""
    command.use_utf8()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in command.HELP_FLAGS:
        print(_help())
    elif name == "--version":
        installed = versions(PACKAGES)
        print(", ".join(f"{name} {installed[name]}" for name in (*PACKAGES, "python")))
    elif name in MODULES:
        del sys.argv[1]
        # As `python -m` does: worker processes find the command by its name.
        runpy.run_module(MODULES[name], run_name="__main__", alter_sys=True)
    else:
        command.log(
            f"{PROGRAM}: {name!r:.80} is not a command. Expected: {', '.join(MODULES)}. "
            f"{PROGRAM} --help describes them."
        )
        sys.exit(command.STATUS_USER_ERROR)


def _help() -> str:
    width = max(map(len, MODULES))
    return "\n".join(
        [
            "Pretrain, fine-tune and serve BERT in TensorFlow.",
            "",
            f"    {PROGRAM} COMMAND --flag=value ...",
            "",
            "Commands:",
            *(f"  {name:{width}}  {_purpose(module)}" for name, module in MODULES.items()),
            "",
            f"{PROGRAM} COMMAND --help describes a command and its flags.",
            f"{PROGRAM} --version prints the versions of {', '.join(PACKAGES)} and python.",
        ]
    )


def _purpose(module):
    """Return the first sentence of a module's docstring without importing the module."""
    spec = importlib.util.find_spec(module)
    source = pathlib.Path(spec.origin).read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
    return " ".join(first.split()).removesuffix(".")


if __name__ == "__main__":
    main()
