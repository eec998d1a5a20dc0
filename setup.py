"""Installs bert_tf, tasks and export. Each requirement is there for the reason beside it."""

import setuptools

CORE = [
    "tensorflow>=2.21.0,<2.22",
    "tensorflow-text>=2.21.1,<2.22",  # The tokenizer's operations; 2.21.0 is broken.
    "keras>=3.15.1,<3.16",  # Comes with TensorFlow; pinned, since AdamW extends its optimizer.
    "keras-nlp>=0.32.0,<0.33",  # Reads its presets; imported nowhere else.
    "tokenizers>=0.23.3,<0.24",  # Merges the pieces of a vocabulary; imported for nothing else.
    "numpy>=1.26",
    "scikit-learn>=1.5",  # Metrics of classification.
    "scipy>=1.13",  # Correlations, and the search of a temperature.
    "seqeval==1.2.2",  # Metrics of entities.
    "absl-py>=2.1",  # Flags.
    "jinja2>=3.1",  # The text files in exported models.
    "tqdm>=4.66",  # Progress bars on terminals.
    "requests>=2.32",  # Requests to the REST API of TensorFlow Serving.
    "safetensors>=0.8",  # Hugging Face weights, without pickles; earlier ones read no bfloat16.
    "nupunkt==0.8.0",  # Sentences of running text, no downloads; shards depend on it.
    "ml-dtypes>=0.5",  # Registers bfloat16 with numpy, in which safetensors reads it.
]
DOCS = ["mkdocs-material==9.8.1"]  # The site of docs/, by `make docs`.
EXTRAS = {
    "docs": DOCS,
    "beam": [
        "apache-beam==2.77.0"
    ],  # Pretraining data beyond one machine; resolves with TensorFlow 2.21.
    "tensorboard": [
        "tensorboard>=2.21"
    ],  # 2.20 imports pkg_resources, which setuptools no longer has.
    "plots": ["matplotlib>=3.9"],
    "serving": ["tensorflow-serving-api>=2.21,<2.22"],  # gRPC requests and warm-up records.
    "test": [
        *DOCS,  # `make lint` builds the site.
        "pytest>=8",
        "pytest-xdist>=3.6",  # Two at a time: half of the tests wait for a process of their own.
        "ruff==0.17.5",  # One version, so that "formatted" means one thing.
        "mypy==2.4.1",  # Types of public code.
        "apache-beam==2.77.0",  # Shards are the same on its runner.
        "matplotlib>=3.9",  # The notebook plots.
        "pandas>=2.2",  # Rows and labels of `fit` may be columns of a table.
        "tensorboard>=2.21",  # The callback of Keras writes the metrics of `fit`.
        "nbclient>=0.10",  # The test that executes it.
        "nbformat>=5.10",
        "ipykernel>=6.29",
        "pyyaml>=6",  # The Compose file of examples/ is parsed.
        "tensorflow-serving-api>=2.21,<2.22",  # gRPC, asked and answered; files read.
    ],
}

setuptools.setup(
    name="bert_tf",
    version="0.1.0",
    description="BERT in TensorFlow: from raw text to a served answer, in one application.",
    long_description="See README.md.",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=setuptools.find_packages(
        include=["bert_tf", "bert_tf.*", "tasks", "tasks.*", "export", "export.*"]
    ),
    package_data={
        "bert_tf": ["py.typed"],
        "bert_tf.text": ["unicode_tables.npz"],
        "tasks": ["py.typed"],
        "export": ["py.typed", "templates/*"],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
)
