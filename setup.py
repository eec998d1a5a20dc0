"""Installs bert_tf, tasks and export. Each requirement is there for the reason beside it."""

import pathlib
import re

import setuptools

TENSORFLOW = ">=2.20,<3"
CORE = [
    f"tensorflow{TENSORFLOW}",
    # The tokenizer's operations; requires TensorFlow of the same minor version. 2.21.0 is broken.
    "tensorflow-text>=2.20,!=2.21.0,<3",
    "keras>=3.12,<4",  # Comes with TensorFlow; AdamW extends its optimizer.
    "keras-nlp>=0.25.1,<1",  # Reads its presets; imported nowhere else.
    "tokenizers>=0.22,<1",  # Merges the pieces of a vocabulary; writes tokenizer.json.
    "huggingface_hub>=0.25",  # Downloads models of the hub by their ids; comes with tokenizers.
    "numpy>=1.26",
    "scikit-learn>=1.5",  # Metrics of classification.
    "scipy>=1.13",  # Correlations, and the search of a temperature.
    "seqeval>=1.2.2,<2",  # Metrics of entities.
    "absl-py>=2.1",  # Flags.
    "filelock>=4,<5",  # One writer per directory; comes with tokenizers. 3 empties held lock files.
    "jinja2>=3.1",  # The text files in exported models.
    "tqdm>=4.66",  # Progress bars on terminals.
    "requests>=2.32",  # Requests to the REST API of TensorFlow Serving.
    "safetensors>=0.8",  # Hugging Face weights, without pickles; earlier ones read no bfloat16.
    "nupunkt==0.8.0",  # Sentences of running text, no downloads; shards depend on it.
    "ml-dtypes>=0.5",  # Registers bfloat16 with numpy, in which safetensors reads it.
]
# Extras for users, all of which `all` installs.
OPTIONAL = {
    # Pretraining data beyond one machine.
    "beam": ["apache-beam>=2.77,<3"],
    # Approximate search in an index that is mapped into memory as it was saved; 13 MB with its
    # dependency. hnswlib has had no release since 2023 and no wheels. faiss-cpu is kept as well,
    # but its wheel is larger (19 MB) and brings a BLAS of its own.
    "index": ["usearch>=2.26,<3"],
    # Runs and checks LiteRT files; the interpreter inside of TensorFlow is deprecated.
    "litert": ["ai-edge-litert>=2.3,<3"],
    "parquet": ["pyarrow>=16"],  # Rows and predictions in .parquet.
    "plots": ["matplotlib>=3.9"],
    # gRPC requests and warm-up records.
    "serving": ["tensorflow-serving-api>=2.20,<3"],
    # Of TensorFlow's version. 2.20 imports pkg_resources, which setuptools has before 81.
    "tensorboard": ["tensorboard>=2.20,<3"],
}
DOCS = ["mkdocs-material==9.8.1"]  # The site of docs/, by `make docs`.
EXTRAS = {
    **OPTIONAL,
    "all": sorted(requirement for extra in OPTIONAL.values() for requirement in extra),
    "and-cuda": [f"tensorflow[and-cuda]{TENSORFLOW}"],  # NVIDIA's libraries, on Linux.
    "docs": DOCS,
    "test": [
        *OPTIONAL["beam"],  # Shards are the same from Beam.
        *OPTIONAL["index"],  # An index is built and searched.
        *OPTIONAL["litert"],  # LiteRT files are run.
        *OPTIONAL["parquet"],  # Files are read and written.
        *OPTIONAL["plots"],  # The notebook plots.
        *OPTIONAL["serving"],  # gRPC, asked and answered; files read.
        *OPTIONAL["tensorboard"],  # The callback of Keras writes the metrics of `fit`.
        *DOCS,  # `make lint` builds the site.
        "pytest>=8",
        "pytest-xdist>=3.6",  # Two at a time: half of the tests wait for a process of their own.
        "ruff==0.17.5",  # One version, so that "formatted" means one thing.
        "mypy==2.4.1",  # Types of public code.
        "pytrec-eval-terrier>=0.5.11",  # Numbers of trec_eval, to compare metrics with.
        "pandas>=2.2",  # Rows and labels of `fit` may be columns of a table.
        "nbclient>=0.10",  # The test that executes it.
        "nbformat>=5.10",
        "ipykernel>=6.29",
        "pyyaml>=6",  # Files of examples/ and of the workflow are parsed.
        "setuptools>=77",  # A wheel is built and installed, without a download.
    ],
}


def long_description() -> str:
    """Return README.md without its index of pages and links to files, which no index page has."""
    text = pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"\n## Documentation\n.*?(?=\n## )", "", text, flags=re.DOTALL)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


setuptools.setup(
    name="bert_tf",
    version="0.1.0",
    description="BERT in TensorFlow: from raw text to a served answer, in one application.",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The bert_tf authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "bert",
        "classification",
        "fine-tuning",
        "keras",
        "named entity recognition",
        "nlp",
        "pretraining",
        "question answering",
        "tensorflow",
        "tensorflow serving",
        "transformer",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=setuptools.find_packages(
        include=["bert_tf", "bert_tf.*", "tasks", "tasks.*", "export", "export.*"]
    ),
    package_data={"": ["py.typed", "*.npz", "*.html", "templates/*"]},
    entry_points={"console_scripts": ["bert-tf = bert_tf.__main__:main"]},
    install_requires=CORE,
    extras_require=EXTRAS,
)
