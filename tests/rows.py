"""Words, sentences, sizes and forms of text that need no TensorFlow."""

WORDS = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the bill is too high screen broken app does not open un "
    "##aff ##able ! , ? a b c "
    "##s cafe 中 my"
).split()
SENTENCES = [
    *("the bill is too high", "my bill is high !", "the screen is broken", "not open , the app"),
    *('he said "un" , "aff"', "cafe é 中", "it's & the <b>", "a b c , b c a"),
]
CONFIG = {
    "vocab_size": len(WORDS),
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "hidden_act": "gelu",
    "max_position_embeddings": 16,
}


def as_others_write(text):
    """Return a text with LF as other programs write it, by name of the difference."""
    return {
        "mark": b"\xef\xbb\xbf" + text.encode(),
        "CR LF": text.replace("\n", "\r\n").encode(),
        "CR": text.replace("\n", "\r").encode(),
        "mark and CR": b"\xef\xbb\xbf" + text.replace("\n", "\r").encode(),
    }
