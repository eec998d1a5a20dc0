"""From rows of files and Python objects to batches.

A row passes six types on its way to the model:

    Example          A row as a reader yields it: texts by input name, label, location. It is one
                     object, since errors name the row. (`BadRow` takes its place if it has one.)
    Examples         All rows by column, as TensorFlow and the metrics take them.
    Tokens           Ids and character offsets of texts, before anything is truncated.
    Packed           Sequences [CLS] A [SEP] B [SEP] of tokens, as the encoder reads them.
    Windows          `Packed`, and the example and the position that each of them is from: a long
                     text becomes several, and metrics and predictions refer to the text.
    EncodedExamples  The windows of all examples with labels and weights: the source of batches,
                     which are dicts of tensors in the layout of the encoder.

The label of an `Example` is as it is written in the file until the task converts it. Readers need
no TensorFlow, so that a file is checked before it is imported; `FileRows` keeps what was read then,
so that a file is opened once.
"""
