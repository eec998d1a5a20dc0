"""Losses of embeddings: in-batch negatives, scored pairs, triplets, and vectors of a teacher.

Every loss takes the embeddings of the texts of B rows, `(B, C, D)`: of a row, its anchor, its
positive, and its hard negatives; the two texts of a scored pair; or one text of a class. C may be
unknown when the graph is built, so that rows with and without negatives share one.

Shape suffixes: B rows, C texts per row, D size of an embedding, G candidates of all rows.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tasks.types.similarity.embedding_model import cosine, normalized

LOSSES = ("contrastive", "cosent", "cosine", "triplet")
NO_TEXT = -1  # The number of a missing text, such as of a row with fewer negatives than others.
# Added to the score of a text that is no candidate: its probability is 0 in float32.
_EXCLUDED = -1e9


@keras.saving.register_keras_serializable("bert_tf")
def embedding_loss(
    labels: tf.Tensor,
    vectors_BCD: tf.Tensor,
    weights_B: tf.Tensor,
    loss: str,
    temperature: float,
    symmetric: bool,
    margin: float,
    sizes: Sequence[int] = (),
) -> tf.Tensor:
    """Return the loss of each row, float32 `(B,)`.

    Args:
        labels: Scores `(B,)`, or numbers of texts `(B, C)`, see `in_batch_negatives`.
        vectors_BCD: Embeddings.
        weights_B: Weights of the rows; those of weight 0 are padding.
        loss: One of LOSSES.
        temperature: Of "contrastive" and "cosent".
        symmetric: Of "contrastive".
        margin: Of "triplet".
        sizes: Sizes of the prefixes over which the loss is averaged, the Matryoshka dimensions
            (Kusupati et al. 2022); by default the whole vector. "triplet" compares prefixes of
            length 1, as in sentence-transformers.
    """
    losses = []
    for size in sizes or (vectors_BCD.shape[-1],):
        part_BCd = vectors_BCD[..., :size]
        if loss == "contrastive":
            losses.append(in_batch_negatives(labels, part_BCd, weights_B, temperature, symmetric))
        elif loss == "cosent":
            losses.append(ranked_cosines(labels, part_BCd, weights_B, temperature))
        elif loss == "cosine":
            losses.append(cosine_error(labels, part_BCd))
        else:
            part_BCd = normalized(part_BCd) if sizes else part_BCd  # The others compare cosines.
            losses.append(triplet_margin(labels, part_BCd, margin))
    return tf.add_n(losses) / len(losses)


def in_batch_negatives(
    texts_BC: tf.Tensor,
    vectors_BCD: tf.Tensor,
    weights_B: tf.Tensor,
    temperature: float,
    symmetric: bool = False,
) -> tf.Tensor:
    """Return the softmax cross-entropy of each anchor's positive among the texts of all rows.

    This is InfoNCE (van den Oord et al. 2018), with the positives and hard negatives of the other
    rows as negatives (Henderson et al. 2017). A text that equals the anchor, or a positive of it in
    any row of the batch, is no negative.

    In rows of one text, its positives are the others of its class in the batch (Khosla et al.
    2020). Its loss is the mean over them, each compared with the negatives alone. A text without
    one is only a negative: its loss is the mean of all others, which leaves that mean as it is.

    Args:
        texts_BC: Integer number of each text: equal numbers are equal texts, or texts of one class.
            NO_TEXT is a missing one. `(B,)` if C is 1.
        vectors_BCD: Their embeddings: anchor, positive, hard negatives; or the text of a class.
        weights_B: Weights of the rows; those of weight 0 are padding and give no candidates.
        temperature: Divisor of the cosines.
        symmetric: Averages the loss with that of each positive's anchor among all anchors.

    Returns:
        float32 `(B,)`.
    """
    vectors_BCD = normalized(tf.cast(vectors_BCD, tf.float32))
    texts_BC = tf.reshape(texts_BC, tf.shape(vectors_BCD)[:2])  # Keras drops an axis of 1.
    texts_BC = tf.where(weights_B[:, tf.newaxis] > 0, texts_BC, NO_TEXT)
    size, is_alone = vectors_BCD.shape[2], tf.shape(texts_BC)[1] == 1
    anchors_BD, positives_BD = vectors_BCD[:, 0], vectors_BCD[:, :2][:, -1]
    # All positives come first, so that the positive of row b is candidate b.
    candidates_GD = tf.concat([positives_BD, tf.reshape(vectors_BCD[:, 2:], [-1, size])], axis=0)
    own_B, others_B = texts_BC[:, 0], texts_BC[:, :2][:, -1]
    texts_G = tf.concat([others_B, tf.reshape(texts_BC[:, 2:], [-1])], axis=0)

    def cross_entropy(queries_BD, candidates_GD, texts_G, own_B, others_B):
        scores_BG = tf.matmul(queries_BD, candidates_GD, transpose_b=True) / temperature
        return _cross_entropy(scores_BG, texts_G, own_B, others_B, weights_B, is_alone)

    losses_B = cross_entropy(anchors_BD, candidates_GD, texts_G, own_B, others_B)
    if not symmetric:
        return losses_B
    of_positives_B = cross_entropy(positives_BD, anchors_BD, own_B, others_B, own_B)
    return (losses_B + of_positives_B) / 2.0


def _cross_entropy(scores_BG, texts_G, own_B, others_B, weights_B, is_alone):
    """Return -log softmax of the positive of each query, candidate b, among it and all negatives.

    No negatives are candidates that equal the text of the query, `own_B`, or the text of `others_B`
    in a row with the same query. Where rows `is_alone`, all others that equal it are positives.
    """
    num_rows, num_candidates = tf.unstack(tf.shape(scores_BG))
    is_same_BB = own_B[:, tf.newaxis] == own_B[tf.newaxis]
    is_other_BG = others_B[:, tf.newaxis] == texts_G[tf.newaxis]
    num_known_BG = tf.matmul(tf.cast(is_same_BB, tf.float32), tf.cast(is_other_BG, tf.float32))
    is_equal_BG = own_B[:, tf.newaxis] == texts_G[tf.newaxis]
    is_excluded_BG = (num_known_BG > 0) | is_equal_BG | (texts_G == NO_TEXT)[tf.newaxis]
    is_own_BG = tf.range(num_rows)[:, tf.newaxis] == tf.range(num_candidates)[tf.newaxis]
    is_positive_BG = tf.where(is_alone, is_equal_BG & ~is_own_BG, is_own_BG)
    negatives_B = tf.reduce_logsumexp(tf.where(is_excluded_BG, _EXCLUDED, scores_BG), axis=1)
    losses_BG = tf.where(
        is_positive_BG, tf.nn.softplus(negatives_B[:, tf.newaxis] - scores_BG), 0.0
    )
    num_positives_B = tf.math.count_nonzero(is_positive_BG, axis=1, dtype=tf.float32)
    losses_B = tf.math.divide_no_nan(tf.reduce_sum(losses_BG, axis=1), num_positives_B)
    has_positive_B = num_positives_B > 0
    weights_B = tf.where(has_positive_B, tf.cast(weights_B, tf.float32), 0.0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(losses_B * weights_B), tf.reduce_sum(weights_B))
    return tf.where(has_positive_B, losses_B, mean)


def ranked_cosines(
    scores_B: tf.Tensor, vectors_BCD: tf.Tensor, weights_B: tf.Tensor, temperature: float
) -> tf.Tensor:
    """Return CoSENT: log(1 + sum exp((cos_i - cos_j) / temperature)) over score_i < score_j.

    The loss asks for the order of the cosines alone (Su 2022). It is one number for the batch, in
    which a row of weight 2 counts like two rows.

    Args:
        scores_B: Scores of the pairs.
        vectors_BCD: Embeddings of the two texts, C = 2.
        weights_B: Weights of the rows; those of weight 0 are padding.
        temperature: Divisor of the differences.

    Returns:
        float32 `(B,)`, equal for all rows.
    """
    cosines_B = cosine(vectors_BCD[:, 0], vectors_BCD[:, 1]) / temperature
    scores_B, is_row_B = tf.cast(scores_B, tf.float32), weights_B > 0
    differences_BB = cosines_B[:, tf.newaxis] - cosines_B[tf.newaxis]
    is_wrong_BB = scores_B[:, tf.newaxis] < scores_B[tf.newaxis]
    is_wrong_BB &= is_row_B[:, tf.newaxis] & is_row_B[tf.newaxis]
    log_weights_B = tf.math.log(tf.where(is_row_B, tf.cast(weights_B, tf.float32), 1.0))
    differences_BB += log_weights_B[:, tf.newaxis] + log_weights_B[tf.newaxis]
    differences_BB = tf.where(is_wrong_BB, differences_BB, _EXCLUDED)
    loss = tf.reduce_logsumexp(tf.pad(tf.reshape(differences_BB, [-1]), [[1, 0]]))
    return tf.fill(tf.shape(scores_B), loss)


def cosine_error(scores_B: tf.Tensor, vectors_BCD: tf.Tensor) -> tf.Tensor:
    """Return (cosine - score)^2 `(B,)` of scored pairs, whose scores are cosines."""
    cosines_B = cosine(vectors_BCD[:, 0], vectors_BCD[:, 1])
    return tf.square(cosines_B - tf.cast(scores_B, tf.float32))


def triplet_margin(texts_BC: tf.Tensor, vectors_BCD: tf.Tensor, margin: float) -> tf.Tensor:
    """Return max(0, distance to the positive - distance to the negative + margin), `(B,)`.

    The distance is Euclidean (Schroff et al. 2015). With several negatives the losses are averaged.

    Args:
        texts_BC: Numbers of the texts; NO_TEXT is a missing one.
        vectors_BCD: Embeddings: anchor, positive, negatives.
        margin: The difference of distances that is asked for.
    """
    vectors_BCD = tf.cast(vectors_BCD, tf.float32)
    distances_BC = _norm(vectors_BCD[:, :1] - vectors_BCD[:, 1:])
    losses_BC = tf.nn.relu(distances_BC[:, :1] - distances_BC[:, 1:] + margin)
    is_there_BC = tf.cast(texts_BC[:, 2:] != NO_TEXT, tf.float32)
    return tf.math.divide_no_nan(
        tf.reduce_sum(losses_BC * is_there_BC, axis=1), tf.reduce_sum(is_there_BC, axis=1)
    )


def vector_distance(
    teacher_BCD: tf.Tensor, vectors_BCD: tf.Tensor, temperature: float, similarity: str
) -> tf.Tensor:
    """Return half the squared distance of vectors from a teacher's, as a mean over a row's texts.

    With the similarity "cosine" it is that of vectors of length 1, which is 1 - cosine: lengths do
    not matter then, and of the other similarities they do.

    Args:
        teacher_BCD: Embeddings of the teacher, 0 for a missing text.
        vectors_BCD: Embeddings of the student.
        temperature: Not used; vectors have none.
        similarity: A key of SIMILARITIES.

    Returns:
        float32 `(B,)`.
    """
    teacher_BCD, vectors_BCD = (tf.cast(of, tf.float32) for of in (teacher_BCD, vectors_BCD))
    is_there_BC = tf.cast(tf.reduce_any(teacher_BCD != 0.0, axis=-1), tf.float32)
    if similarity == "cosine":
        teacher_BCD, vectors_BCD = normalized(teacher_BCD), normalized(vectors_BCD)
    distances_BC = tf.reduce_sum(tf.square(teacher_BCD - vectors_BCD), axis=-1) / 2.0
    return tf.math.divide_no_nan(
        tf.reduce_sum(distances_BC * is_there_BC, axis=1), tf.reduce_sum(is_there_BC, axis=1)
    )


def _norm(vectors):
    """Return the length of vectors; its gradient at 0 is 0, not NaN."""
    squares = tf.reduce_sum(tf.square(vectors), axis=-1)
    is_zero = squares == 0.0
    return tf.where(is_zero, 0.0, tf.sqrt(tf.where(is_zero, 1.0, squares)))
