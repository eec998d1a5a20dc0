"""Write unicode_tables.npz for the Unicode version of the running Python (3.11: 14.0).

python -m bert_tf.text.make_tables        (takes a minute)
"""

from bert_tf.text import unicode_tables

if __name__ == "__main__":
    unicode_tables.save(unicode_tables.PATH)
    print(unicode_tables.PATH, unicode_tables.unicode_version(), unicode_tables.sha256())
