"""Plot the attention of a text: an image of one head or layer, or an interactive page.

    bert-tf plot_attention --run=RUN --text="My bill is wrong." --layer=0 --output=x.png
    bert-tf plot_attention --run=RUN --text="Who?" --text_b="Anna." --output=x.html

A .png shows all heads of --layer as a grid, or --head as a matrix. A .html file shows all layers
and heads, with their values, in a browser; it loads nothing from the network.
"""

import dataclasses

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.storage import files, ownership, paths
from bert_tf.system import command
from bert_tf.weights import sources


@dataclasses.dataclass(frozen=True)
class PlotAttentionSettings:
    """Flags of the command."""

    run: str = command.flag("run directory, or other pretrained weights or their id")
    text: str = command.flag("the text")
    output: str = command.flag("output file, .png or .html")
    text_b: str | None = command.flag("second text of a pair", None)
    layer: int | None = command.flag("layer of an image, from 0; default: the last", None)
    head: int | None = command.flag("head of an image, from 0; default: all of the layer", None)
    max_seq_length: int = command.flag(
        "maximum tokens, with [CLS] and [SEP]", 128, bounds={">=": 4}
    )
    overwrite: bool = command.flag("replacement of an existing --output file", False)

    def __post_init__(self) -> None:
        command.check_bounds(self)
        command.check_text("text", self.text)
        command.check_text("text_b", self.text_b)
        if not self.output.endswith((".png", ".html")):
            raise UserError(f"--output={self.output}: expected a .png or .html file")
        if self.output.endswith(".html") and (self.layer, self.head) != (None, None):
            raise UserError("--layer, --head: expected with a .png; a .html shows all of them")
        paths.check_output(self.output, [self.run], self.overwrite)

    def check(self) -> None:
        """Check the weights, the layer and the head without TensorFlow; raises UserError."""
        config = sources.check(self.run)
        if config is not None:
            self.check_fits(config)

    def check_fits(self, config: BertConfig) -> None:
        """Check that a model of a configuration has the layer and the head; raises UserError."""
        for name, count in (
            ("layer", config.num_hidden_layers),
            ("head", config.num_attention_heads),
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value < count:
                raise UserError(f"--{name}={value}: expected an integer in [0, {count - 1}]")


def main(settings: PlotAttentionSettings) -> None:
    """Write the plot."""
    from bert_tf.attention_maps.plots import attention_of, head_image, layer_image, page
    from bert_tf.train.distribution import use_precision

    use_precision("float32")
    with ownership.sole_output(settings.output, settings.overwrite):
        pretrained = sources.read_pretrained(settings.run)
        settings.check_fits(pretrained.config)  # Of some sources, it is known only once read.
        attention = attention_of(
            pretrained, settings.text, settings.text_b, settings.max_seq_length
        )
        if settings.output.endswith(".html"):
            files.atomic_write_text(settings.output, page(attention))
        else:
            layer = len(attention.weights_NATT) - 1 if settings.layer is None else settings.layer
            image = (
                layer_image(attention, layer)
                if settings.head is None
                else head_image(attention, layer, settings.head)
            )
            files.atomic_write_bytes(settings.output, image)
    layers, heads, length, _ = attention.weights_NATT.shape
    size = f"{length} tokens, {layers} layers, {heads} heads"
    command.log(f"{settings.output}: {size}, {pretrained.origin}")


if __name__ == "__main__":
    command.run_main(main, PlotAttentionSettings, __doc__)
