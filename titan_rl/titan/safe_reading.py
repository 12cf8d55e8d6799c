"""Read DCP checkpoints without running what is in them.

DCP reads its ``.metadata`` with pickle and byte entries with ``torch.load(weights_only=False)``, so a file
from elsewhere could run any code. Here ``.metadata`` goes through an unpickler that knows the few classes
that DCP writes, and byte entries through ``weights_only``. All that titan_rl loads from a checkpoint is
loaded with :func:`load`.
"""

from __future__ import annotations

import collections
import os
import pathlib
import pickle
import warnings
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import _get_layout

_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    (filesystem.__name__, "_StoragePrefix"): filesystem._StoragePrefix,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    # Where the checkpoint was written, as a path; making one touches no file.
    ("pathlib", "Path"): pathlib.PurePosixPath,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
}


class UnsafeCheckpointError(pickle.UnpicklingError):
    """A checkpoint asks for code that no checkpoint needs."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        found = _CLASSES.get((module_name, global_name))
        if found is None and module_name == "torch":
            found = getattr(torch, global_name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise UnsafeCheckpointError(
                "A checkpoint's .metadata must name DCP's own classes only; got "
                f"{module_name}.{global_name}. It was not written by DCP: do not load it."
            )
        return found


class SafeReader(filesystem.FileSystemReader):
    """DCP's reader, with ``.metadata`` read through an allow-list."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``, or a rank's own with ``rank=``.

        Raises:
            UnsafeCheckpointError: it names anything but DCP's own classes.
        """
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            found = _unpickle(cast(IO[bytes], stream))
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class SafePlanner(DefaultLoadPlanner):
    """DCP's planner, with byte entries read as plain values and tensors only."""

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:  # pyrefly: ignore[bad-override]
        """Put one byte entry into the state dict.

        Raises:
            pickle.UnpicklingError: it is more than values and tensors.
        """
        loaded = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def _unpickle(stream: IO[bytes]) -> Metadata:
    found = _Unpickler(stream).load()
    if not isinstance(found, Metadata):
        raise UnsafeCheckpointError(f".metadata must hold DCP's Metadata; got {type(found).__name__}.")
    return found


def read_metadata(directory: str | os.PathLike[str]) -> Metadata:
    """The ``.metadata`` of a checkpoint.

    Args:
        directory: A ``step-N`` directory.

    Raises:
        UnsafeCheckpointError: it names anything but DCP's own classes.
        OSError: it cannot be read.
    """
    with (Path(directory) / ".metadata").open("rb") as stream:
        return _unpickle(stream)


def load(state_dict: dict[str, Any], directory: str | os.PathLike[str], *, no_dist: bool = False) -> None:
    """``torch.distributed.checkpoint.load`` through the safe reader. Collective unless ``no_dist``.

    Args:
        state_dict: Filled in place.
        directory: A ``step-N`` directory.
        no_dist: Load in this process alone, without a process group.

    Raises:
        CheckpointException: it cannot be read into this state dict, or it is not safe.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state_dict, storage_reader=SafeReader(directory), planner=SafePlanner(), no_dist=no_dist)


def tensor_shapes(found: Metadata) -> dict[str, tuple[tuple[int, ...], str]]:
    """Global shape and dtype of every tensor of a checkpoint, by name."""
    return {
        name: (tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
        for name, entry in found.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
