"""The LightningDataModule: from a source's images to normalised batches, the same whatever the devices."""

import socket
import warnings
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Sampler

from project.data.augment import Augmentation
from project.data.batches import (
    BatchIndex,
    BatchLoader,
    EvaluationSampler,
    GlobalBatchSampler,
    ImageBatches,
    follow_the_parent,
)
from project.data.cache import ImageCache, Manifest
from project.data.folder import FolderSource, folder_of_images
from project.data.normalize import Normalization
from project.data.sources import Cifar10Source, Source
from project.data.split import num_split_off, split_by_class
from project.data.synthetic import SyntheticSource
from project.errors import UsageError
from project.own import class_of_this_clone

SOURCES = ("auto", "cifar10", "folder", "synthetic")


class ImageDataModule(LightningDataModule):
    """Images of one source, split, cached, batched and normalised. Works with any Trainer.

    Args:
        source: "cifar10"; "folder", your own images under `root`; "synthetic", generated shapes; or "auto", CIFAR-10
            if it is there or can be fetched, otherwise synthetic, with a warning. Or a source of your own, by the name of
            its class: "project.data.npz.NpzSource".
        root: Folder of the images: holds cifar-10-batches-py, or for "folder" a folder for each class, or train/<class>/
            and, where you have them, val/<class>/ and test/<class>/.
        batch_size: Images per training step, over all devices; each of N devices gets 1/N of them.
        image_size: Height and width of the images in pixels; a folder's images are brought to it.
        val_fraction: Share of the training images kept for validation, the same share of every class, unless the
            folder has a val/ of its own; 0 for no validation.
        test_fraction: For "folder" without a test/ of its own: share of each class kept for testing, by the files' names,
            the same for every seed.
        shift: Training images are shifted by up to this many pixels each way; 0 for none.
        flip: Whether training images are mirrored left to right, half of them in each epoch.
        alternate_flip: With `flip`, whether each image is mirrored in every other epoch, instead of by a new draw in each.
        normalize: Whether pixels have the training images' mean subtracted and are divided by their standard
            deviation; otherwise they are divided by 255 only.
        eval_batch_size: Images per evaluation batch, on each device.
        num_workers: Processes that prepare batches, for each device; 0 prepares them in the training process, which
            takes a few percent of the time that the default network needs on a CPU.
        cache_dir: Folder of the decoded images, which all processes of a machine share.
        seed: Decides the validation split, the order of the images and their augmentation. The command line takes it
            from --seed.
        class_names: For "folder", to evaluate on images of your own: the classes that a trained network knows, in the
            order of their labels. Then test/<class>/ is enough. evaluate.py takes them from the checkpoint.

    Raises:
        UsageError: A value that cannot work, in one line that names it.
    """

    def __init__(
        self,
        source: str = "auto",
        root: str = "data",
        batch_size: int = 64,
        image_size: int = 32,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        shift: int = 4,
        flip: bool = True,
        alternate_flip: bool = False,
        normalize: bool = True,
        eval_batch_size: int = 500,
        num_workers: int = 0,
        cache_dir: str = "data/cache",
        seed: int = 0,
        class_names: list[str] | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("data.image_size", image_size, 8),
            ("data.shift", shift, 0),
            ("data.eval_batch_size", eval_batch_size, 1),
            ("data.num_workers", num_workers, 0),
            ("seed", seed, 0),
        ):
            if value < least:
                raise UsageError(f"--{name} {value} must be at least {least}")
        if not 0 <= val_fraction < 1:
            raise UsageError(f"--data.val_fraction {val_fraction} must be at least 0 and below 1")
        if not 0 <= test_fraction < 1:
            raise UsageError(f"--data.test_fraction {test_fraction} must be at least 0 and below 1")
        if alternate_flip and not flip:
            raise UsageError("--data.alternate_flip true has nothing to do with --data.flip false; leave one of them out")
        if shift >= image_size:
            raise UsageError(f"--data.shift {shift} must be below --data.image_size, which is {image_size}")
        if source in ("auto", "cifar10") and image_size != 32:
            raise UsageError(f"--data.image_size {image_size}: CIFAR-10 images are 32; give --data.source folder")
        if source in ("auto", "cifar10") and (found := folder_of_images(Path(root))):
            raise UsageError(f"--data.root {root} holds {found}/, images of your own: add --data.source folder")
        self.source = source
        self.root = Path(root)
        self.batch_size = batch_size
        self.image_size = image_size
        self.val_fraction = val_fraction
        self.shift = shift
        self.flip = flip
        self.alternate_flip = alternate_flip
        self.normalize = normalize
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.cache_dir = Path(cache_dir)
        self.seed = seed
        # It is looked at now: a wrong path should be an error before any process starts.
        self._own = self._source_of_the_user(test_fraction, class_names)
        self.quiet = False  # whether to say nothing of downloads and decoding
        self._manifest: Manifest | None = None
        self._decided: str | None = None  # the source in use, once this process has prepared it

    # ---- what the network needs to know

    @property
    def num_classes(self) -> int:
        """The number of classes; known before the images are prepared."""
        return len(self._own.class_names()) if self._own else 10

    @property
    def manifest(self) -> Manifest:
        """What the cache says about the images; there once `setup` has run."""
        assert self._manifest is not None, "call prepare_data() and setup() first"
        return self._manifest

    @property
    def resolved_source(self) -> str:
        """The source in use, "auto" decided; there once `setup` has run."""
        return self.manifest.source

    @property
    def test_is_split_off(self) -> bool:
        """Whether the test images were split off from the training images, as a folder without a test/ has it."""
        return self._own is not None and self._own.test_is_split_off

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, in the order of their labels."""
        return self.manifest.class_names

    def plan(self) -> tuple[str, dict[str, int]]:
        """Return what would be used, in words, and the number of images for "train", "val" and "test".

        Fetches and decodes nothing. Where CIFAR-10 would have to be fetched, the counts are CIFAR-10's.
        """
        name: str = self.source
        what = name
        if self.source in ("auto", "cifar10"):
            name, cifar10 = "cifar10", Cifar10Source(self.root)
            if cifar10.is_there():
                what = f"cifar10, in {self.root}/"
            elif cifar10.archive.exists():
                what = f"cifar10, which would first be extracted from {cifar10.archive}"
            else:
                what = f"cifar10, which would first be downloaded into {self.root}/"
                if self.source == "auto":
                    train, test = SyntheticSource.sizes.values()
                    what += f"; offline, {train:,} + {test:,} synthetic images instead"
        elif self._own:
            slash = "/" if self.root.is_dir() else ""
            what = f"{name}, {self.root}{slash}" + (", test images split off" if self.test_is_split_off else "")
        counts = self._make_source(name).class_counts()
        split_off = (num_split_off(count, self.val_fraction) for count in counts["train"])
        num_val = sum(counts.get("val", split_off))
        num_train = sum(counts["train"]) - (0 if "val" in counts else num_val)
        self._check_batch_size(num_train)
        return what, {"train": num_train, "val": num_val, "test": sum(counts["test"])}

    # ---- once per machine, then once per process

    def prepare_data(self) -> None:
        """Fetch and decode the images, on one process of each machine."""
        if self._decided is None:  # fit and test both call this
            decided = self._prepare_source()
            ImageCache(self._make_source(decided), self.cache_dir).build(self.quiet)
            self._decided = decided

    def setup(self, stage: str | None = None) -> None:
        """Map the decoded images into memory and split them."""
        if self._manifest is not None:
            return
        name = self._decided or self._found_source()
        if self.trainer is not None:
            name = self.trainer.strategy.broadcast(name)  # machines may differ in what they could fetch
        if name == "cifar10" and not Cifar10Source(self.root).is_there():
            raise UsageError(
                f"--data.source {self.source}: CIFAR-10 is not under {self.root} on every machine; put it there"
            )
        cache = ImageCache(self._make_source(name), self.cache_dir)
        cache.build(self.quiet)  # nothing to do, unless this machine had decided for another source
        self._manifest, splits = cache.open()
        self._check_same_everywhere()
        test = splits["test"]
        self.test_batches, self.test_positions = ImageBatches(test.images, test.labels), torch.arange(len(test.labels))
        self.mean, self.std = (self.manifest.mean, self.manifest.std) if self.normalize else ([0.0] * 3, [1.0] * 3)
        self._normalization = Normalization(self.mean, self.std)
        if "train" not in splits:
            if self.trainer is not None and self.trainer.state.fn == "fit":
                raise UsageError("--data.class_names is for evaluation, which reads test/ alone; leave it out to train")
            return
        train = splits["train"]
        val = splits.get("val", train)
        if "val" in splits:
            self.train_positions, self.val_positions = torch.arange(len(train.labels)), torch.arange(len(val.labels))
        else:
            self.train_positions, self.val_positions = split_by_class(train.labels, self.val_fraction, self.seed)
        augment = None
        if self.shift or self.flip:
            augment = Augmentation(len(train.labels), self.shift, self.flip, self.seed, self.alternate_flip)
        self.train_batches = ImageBatches(train.images, train.labels, augment)
        self.val_batches = ImageBatches(val.images, val.labels)
        if self.trainer is None or self.trainer.state.fn == "fit":
            self._check_batch_size(len(self.train_positions))

    def state_dict(self) -> dict[str, Any]:
        """Tell the checkpoint what the network was trained on and how its pixels were scaled."""
        return {
            "source": self.manifest.source,
            "class_names": self.class_names,
            "image_size": self.image_size,
            "mean": self.mean,
            "std": self.std,
            "digest": self.manifest.digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to go on with other images than a checkpoint was trained on; to test it on others, scale them as those."""
        if self.trainer is None or self.trainer.state.fn != "fit":
            if state["class_names"] != self.class_names:
                raise UsageError(
                    f"--data.source {self.resolved_source} has the classes {_some(self.class_names)}; the checkpoint knows"
                    f" {_some(state['class_names'])}: give it images of these"
                )
            if self.test_is_split_off and state["digest"] != self.manifest.digest:
                warnings.warn(
                    f"--data.root {self.root}: the images are not those that the checkpoint was trained with, and its test"
                    " images are split off from them anew: some may be images that it was trained on",
                    stacklevel=2,
                )
            self.mean, self.std = state["mean"], state["std"]
            self._normalization = Normalization(self.mean, self.std)
            return
        for name, before, now in (
            ("--data.source", state["source"], self.manifest.source),
            ("the images", state["digest"], self.manifest.digest),
        ):
            if before != now:
                raise UsageError(
                    f"{name} {now[:12]}: the checkpoint was trained with {before[:12]};"
                    " give it the same images, or start a new run without --resume"
                )

    # ---- batches

    def train_dataloader(self) -> BatchLoader:
        """Return this rank's share of the shuffled global batches."""
        rank, world_size = self._place()
        if self.batch_size % world_size:
            raise UsageError(uneven_batch(self.batch_size, world_size))
        # step 6: our own DistributedSampler, which Lightning leaves as it is
        sampler = GlobalBatchSampler(
            self.train_batches, self.train_positions, self.batch_size, world_size, rank, self.seed, self._num_done
        )
        return self._loader(self.train_batches, sampler)

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Return this rank's validation batches; none where nothing was kept for validation."""
        return self._evaluation_loader(self.val_batches, self.val_positions) if len(self.val_positions) else []

    def test_dataloader(self) -> BatchLoader:
        """Return this rank's test batches."""
        return self._evaluation_loader(self.test_batches, self.test_positions)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch. Lightning's own way looks through it for nested collections first."""
        images, labels = batch
        ahead = device.type == "cuda"  # without waiting for it, from pinned memory; elsewhere torch does not order that
        # step 11: from main memory to the device
        return images.to(device, non_blocking=ahead), labels.to(device, non_blocking=ahead)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise a batch on its device."""
        images, labels = batch
        return self.normalize_images(images), labels

    def some_training_images(self, count: int) -> Tensor:
        """Return training images from all over the set, not augmented: float32 (N, 3, H, W), N at most `count`."""
        spread = self.train_positions[:: -(-len(self.train_positions) // count)]
        return self.normalize_images(self.train_batches.images[spread])

    def normalize_images(self, images: Tensor) -> Tensor:
        """Turn pixels, uint8 (B, 3, H, W), into the network's input, float32 (B, 3, H, W), channels last in memory."""
        return self._normalization(images)

    # ---- the rest is inside

    def _prepare_source(self) -> str:
        """Fetch the images; return the source's name, with "auto" decided."""
        if self.source not in ("auto", "cifar10"):
            return self.source
        try:
            source = Cifar10Source(self.root)
            source.quiet = self.quiet
            source.prepare()
        except UsageError as error:
            if self.source == "cifar10" or Cifar10Source(self.root).is_there():  # a damaged copy is not passed over
                raise
            reason = str(error).partition(": ")[2] if str(error).startswith("--data.source") else str(error)
            warnings.warn(
                "THIS RUN IS NOT ON CIFAR-10: --data.source auto uses SYNTHETIC pictures (disc, ring, square, ...)"
                f" instead. {reason}",
                stacklevel=2,
            )
            return "synthetic"
        return "cifar10"

    def _check_same_everywhere(self) -> None:
        """Compare the images of all ranks: machines may have copies of their own."""
        if self.trainer is None or self.trainer.world_size == 1 or not torch.distributed.is_initialized():
            return
        own = (socket.gethostname(), self.manifest.digest, self.class_names)
        found: list[Any] = [own] * self.trainer.world_size
        torch.distributed.all_gather_object(found, own)
        first, *_ = found
        if others := sorted({f"rank {rank} on {one[0]}" for rank, one in enumerate(found) if one[1:] != first[1:]}):
            raise UsageError(
                f"--data.root {self.root}: the images, or the names of their classes, are not the same on all machines:"
                f" {_some(others)} has others than rank 0 on {first[0]}; give every machine the same copy"
            )

    def _check_batch_size(self, num_train: int) -> None:
        if num_train < self.batch_size:
            raise UsageError(
                f"--batch_size {self.batch_size} is more than the {num_train} training images; use at most {num_train}"
            )

    def _found_source(self) -> str:
        if self.source != "auto":
            return self.source
        return "cifar10" if Cifar10Source(self.root).is_there() else "synthetic"

    def _make_source(self, name: str) -> Source:
        if name == "cifar10":
            return Cifar10Source(self.root)
        return self._own or SyntheticSource(self.image_size)

    def _source_of_the_user(self, test_fraction: float, class_names: list[str] | None) -> Source | None:
        """Return the source where it is the user's own images, by folder or by a class of theirs."""
        if self.source == "folder":
            return FolderSource(self.root, self.image_size, test_fraction, class_names)
        if self.source in SOURCES:
            return None
        if "." not in self.source:
            hint = get_close_matches(self.source, SOURCES, n=1)
            raise UsageError(
                f"--data.source {self.source} is none of {', '.join(SOURCES)}, nor a class of yours by its module"
                + (f"; did you mean {hint[0]}?" if hint else ", as project.data.npz.NpzSource")
            )
        source: Source = class_of_this_clone("data.source", self.source, Source)(self.root, self.image_size)
        source.name = self.source
        return source

    def _place(self) -> tuple[int, int]:
        """Return this process's rank and the number of ranks."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _num_done(self) -> int:
        """Return how many of the epoch's global batches were trained before this process began."""
        training = self.trainer is not None and self.trainer.training
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.ready if training else 0  # type: ignore[union-attr]

    def _evaluation_loader(self, batches: ImageBatches, positions: Tensor) -> BatchLoader:
        rank, world_size = self._place()
        return self._loader(batches, EvaluationSampler(batches, positions, self.eval_batch_size, world_size, rank))

    def _loader(self, batches: ImageBatches, sampler: Sampler[BatchIndex]) -> BatchLoader:
        return BatchLoader(
            batches,
            batch_size=None,  # the sampler yields whole batches
            sampler=sampler,
            num_workers=self.num_workers,
            worker_init_fn=follow_the_parent,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )


def _some(names: list[str]) -> str:
    """Return the first names, and how many there are."""
    return ", ".join(names[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "")


def uneven_batch(batch_size: int, world_size: int) -> str:
    """Return the message for a global batch that the number of devices does not divide."""
    below = batch_size // world_size * world_size
    nearest = f"{below} or {below + world_size}" if below else f"{world_size}"
    return f"--batch_size {batch_size} cannot be shared equally by {world_size} devices; use {nearest}"
