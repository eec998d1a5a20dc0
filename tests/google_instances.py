"""The rules of create_pretraining_data.py, one token at a time, as a reference.

Written from the description of the released algorithm, with plain lists and one random.Random, and
without code of the package.
"""


def instances_of(documents, index, rng, max_seq_length, short_seq_prob):
    """Return [(tokens_a, tokens_b, is_random_next)] of documents[index], a list of sentences."""
    document, found = documents[index], []
    budget = max_seq_length - 3
    target = rng.randint(2, budget) if rng.random() < short_seq_prob else budget
    chunk, position = [], 0
    while position < len(document):
        chunk.append(document[position])
        is_last = position == len(document) - 1
        if is_last or sum(map(len, chunk)) >= target:
            a_end = rng.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
            tokens_a = [token for sentence in chunk[:a_end] for token in sentence]
            is_random = len(chunk) == 1 or rng.random() < 0.5
            if is_random:
                other = rng.choice([number for number in range(len(documents)) if number != index])
                start = rng.randint(0, len(documents[other]) - 1)
                tokens_b = []
                for sentence in documents[other][start:]:
                    tokens_b += sentence
                    if len(tokens_b) >= target - len(tokens_a):
                        break
                position -= len(chunk) - a_end
            else:
                tokens_b = [token for sentence in chunk[a_end:] for token in sentence]
            truncate(tokens_a, tokens_b, budget, rng)
            found.append((tokens_a, tokens_b, is_random))
            chunk = []
        position += 1
    return found


def truncate(tokens_a, tokens_b, budget, rng):
    """Pop tokens one by one from the longer list, at either end."""
    while len(tokens_a) + len(tokens_b) > budget:
        longer = tokens_a if len(tokens_a) > len(tokens_b) else tokens_b
        longer.pop(0 if rng.random() < 0.5 else -1)


def masked_positions(tokens, prob, most, rng, whole_words=False):
    """Return the positions that the released code would predict, in ascending order."""
    words = []
    for position, token in enumerate(tokens):
        if token in ("[CLS]", "[SEP]"):
            continue
        if whole_words and words and token.startswith("##"):
            words[-1].append(position)
        else:
            words.append([position])
    rng.shuffle(words)
    expected = min(most, max(1, round(len(tokens) * prob)))
    found = []
    for word in words:
        if len(found) + len(word) <= expected:
            found += word
    return sorted(found)
