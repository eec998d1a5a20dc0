"""Flags on the devices of an estimate. Does not import TensorFlow."""

import dataclasses

from bert_tf.errors import UserError
from bert_tf.planning.devices import DEVICES, Device, typical_processor
from bert_tf.system.command import flag

STRATEGIES = ("none", "mirrored", "multi_worker", "tpu")


@dataclasses.dataclass(frozen=True)
class PlannedDevices:
    """Devices of an estimate, which this machine need not have; each field is a flag."""

    device: str = flag(
        "type of the estimate's devices; cpu is the processor of this machine",
        "cpu",
        choices=(*DEVICES, "cpu"),
    )
    devices: int = flag("number of the estimate's devices", 1, bounds={">=": 1})
    network_gbps: float = flag(
        "Gbit/s of the network per device of the estimate, for --strategy=multi_worker",
        25.0,
        bounds={">": 0},
    )

    def check_devices(self, strategy: str, global_batch_size: int) -> None:
        """Check that the devices fit the strategy and divide the batch.

        Raises:
            UserError: If they do not.
        """
        if strategy == "none" and self.devices > 1:
            raise UserError(
                f"--devices={self.devices}: expected 1 with --strategy=none; choose mirrored, "
                "multi_worker or tpu"
            )
        is_tpu = self.device.startswith("tpu")
        if (strategy == "tpu" and not is_tpu) or (is_tpu and strategy in ("mirrored", "none")):
            raise UserError(
                f"--device={self.device}: does not fit --strategy={strategy}; TPUs need "
                "--strategy=tpu, and other devices another one"
            )
        if global_batch_size % self.devices:
            raise UserError(
                f"--global_batch_size={global_batch_size}: expected a multiple of --devices="
                f"{self.devices}"
            )

    def check_planned(self, dry_run: bool, strategy: str, global_batch_size: int) -> None:
        """Check the devices of a dry run; without one, that no flag of the estimate is given.

        Raises:
            UserError: If a flag does not fit.
        """
        if dry_run:
            self.check_devices(strategy, global_batch_size)
            return
        for field in dataclasses.fields(PlannedDevices):
            if getattr(self, field.name) != field.default:
                raise UserError(f"--{field.name}: requires --dry_run, whose estimate it describes")

    def linked(self, device: Device, strategy: str) -> Device:
        """Return the device with the link that gradients are sent over in a strategy."""
        if strategy != "multi_worker":
            return device
        return dataclasses.replace(device, link=min(device.link, self.network_gbps * 1e9 / 8))

    def typical(self) -> Device:
        """Return the device with typical rates, which are not measured."""
        return typical_processor() if self.device == "cpu" else DEVICES[self.device]
