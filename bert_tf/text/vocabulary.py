"""The vocabulary: a vocab.txt, one entry a line, an entry's id is its line."""

import hashlib

from bert_tf import files
from bert_tf.errors import UserError

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_BYTES = 64 << 20  # The largest released vocabulary (multilingual) has 1 MB.


class Vocabulary:
    """The entries of a vocab.txt in order: `lines` as in the file, `entries` stripped.

    A line is what stands between two "\\n": the released Chinese file has U+2028 inside lines,
    whose entries become "" and "##" when stripped; they keep their ids and never match.
    """

    def __init__(self, lines, where="vocabulary"):
        self.lines = tuple(lines)
        self.entries = tuple(line.strip() for line in self.lines)
        self._ids = {}
        for number, (line, entry) in enumerate(zip(self.lines, self.entries, strict=True), start=1):
            if not line:
                raise UserError(
                    f"{where}: line {number} is empty; an entry's id is its line, so no line may "
                    "be blank"
                )
            if entry in self._ids:
                raise UserError(
                    f"{where}: line {number} repeats {entry!r:.80} of line {self._ids[entry] + 1}"
                )
            self._ids[entry] = number - 1
        missing = [special for special in SPECIALS if special not in self._ids]
        if missing:
            raise UserError(
                f"{where}: {len(self.entries)} entries without {', '.join(missing)}; is this a "
                "BERT vocab.txt?"
            )

    @classmethod
    def load(cls, path):
        size = files.size(path)
        if size is None:
            raise UserError(f"{path}: no such file, wanted a vocab.txt (an entry a line)")
        if size > MAX_BYTES:
            raise UserError(f"{path}: {size} bytes, wanted a vocab.txt of at most {MAX_BYTES}")
        try:
            text = files.read_text(path)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
        return cls(text.removesuffix("\n").split("\n"), where=str(path))

    def save(self, path):
        files.atomic_write_bytes(path, self.to_bytes())

    def to_bytes(self):
        return "".join(line + "\n" for line in self.lines).encode("utf-8")

    @property
    def sha256(self):
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, entry):
        """The id of an entry; KeyError if there is none."""
        return self._ids[entry]

    def looks_cased(self):
        """True if over 1% of the entries, bracketed ones aside, hold an upper-case letter."""
        entries = [
            entry for entry in self.entries if not (entry.startswith("[") and entry.endswith("]"))
        ]
        return sum(entry != entry.lower() for entry in entries) > 0.01 * len(entries)

    def check_size(self, vocab_size, where):
        if len(self) != vocab_size:
            raise UserError(
                f"{where}: {len(self)} entries, but the configuration's vocab_size is "
                f"{vocab_size}; "
                "the vocabulary has to be the one that the weights were trained with"
            )
