"""What a manifest says is what was written, and what is wrong with a checkpoint is named."""

import hashlib
import json

import pytest

from tests.unit.resilience.saved import FILES, write_checkpoint
from titan_rl.resilience import manifest as manifests
from titan_rl.resilience.manifest import DamagedCheckpointError


def fault_of(path, *, hashes=True):
    return manifests.find_fault(path, manifests.read(path), hashes=hashes)


def test_sizes_and_hashes_are_those_of_the_files(tmp_path):
    path = write_checkpoint(tmp_path, 4, score=0.5, state={"rl_state": {"seed": 2**62}})
    read = manifests.read(path)
    assert {name: record.size for name, record in read.files.items()} == {n: len(b) for n, b in FILES.items()}
    assert read.files[".metadata"].sha256 == hashlib.sha256(FILES[".metadata"]).hexdigest()
    assert read.num_bytes == sum(map(len, FILES.values()))
    assert read.facts.state["rl_state"]["seed"] == 2**62
    assert (read.step, read.facts.held_out.value, read.facts.reward) == (4, 0.5, 0.25)
    assert fault_of(path) is None


def test_a_byte_that_is_missing_or_flipped_is_named_with_what_was_expected(tmp_path):
    path = write_checkpoint(tmp_path, 4)
    shard, content = path / "__1_0.distcp", FILES["__1_0.distcp"]
    shard.write_bytes(content[:-1])
    assert fault_of(path, hashes=False) == "step-4/__1_0.distcp: expected 13 bytes, got 12"
    flipped = bytes([content[0] ^ 1]) + content[1:]
    shard.write_bytes(flipped)
    assert fault_of(path, hashes=False) is None
    expected, got = (hashlib.sha256(data).hexdigest() for data in (content, flipped))
    assert fault_of(path) == f"step-4/__1_0.distcp: expected SHA-256 {expected}, got {got}"
    shard.write_bytes(b"")
    assert fault_of(path) == "step-4/__1_0.distcp: expected 13 bytes, got 0"
    shard.unlink()
    assert fault_of(path) == "step-4/__1_0.distcp: expected 13 bytes, got no such file"
    shard.mkdir()
    assert "step-4/__1_0.distcp" in fault_of(path)


def test_a_file_that_cannot_be_read_is_a_fault_and_no_crash(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path, 4)

    def unreadable(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(manifests, "hash_file", unreadable)
    assert fault_of(path) == "step-4/.metadata cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "step-4/manifest.json cannot be read"),
        (lambda text: text.replace('"step": 4', '"step": 5'), "expected SHA-256 .*, got"),
        (lambda text: text.replace('"format": 1', '"format": 0'), "is not of format 1"),
        (lambda text: "[]", "is not a JSON object"),
    ],
)
def test_a_manifest_that_was_changed_is_no_manifest(tmp_path, damage, message):
    path = write_checkpoint(tmp_path, 4)
    file = path / "manifest.json"
    file.write_text(damage(file.read_text()))
    with pytest.raises(DamagedCheckpointError, match=message):
        manifests.read(path)


def test_without_a_manifest_a_checkpoint_is_not_complete(tmp_path):
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-9" / ".metadata").touch()
    with pytest.raises(DamagedCheckpointError, match=r"step-9 has no manifest\.json"):
        manifests.read(tmp_path / "step-9")


def test_every_file_is_hashed_by_one_rank_and_a_shard_by_the_rank_that_wrote_it():
    shards = [f"__{rank}_0.distcp" for rank in range(8)]
    names = [".metadata", *shards, "config.toml", "sharded/a.safetensors"]
    shares = [manifests.share(names, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(name for part in shares for name in part) == sorted(names)
    for rank in range(8):
        assert f"__{rank}_0.distcp" in shares[rank % 3]
    assert manifests.share(names, rank=0, world_size=1) == names


def test_sidecars_are_taken_once_and_are_not_part_of_the_checkpoint(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    for rank in range(2):
        manifests.write_sidecar(tmp_path, rank, {f"file-{rank}": manifests.hash_file(tmp_path / "a")})
    assert manifests.file_names(tmp_path) == ["a"]
    assert sorted(manifests.take_sidecars(tmp_path)) == ["file-0", "file-1"]
    assert manifests.take_sidecars(tmp_path) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_manifest_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path, 4)
    manifest = manifests.read(path)
    (path / "manifest.json").unlink()
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        manifests.write(path, manifest)
    assert not (path / "manifest.json").exists()


def test_a_fingerprint_depends_on_contents_and_not_on_order():
    assert manifests.fingerprint({"a": 1, "b": 2}) == manifests.fingerprint({"b": 2, "a": 1})
    assert manifests.fingerprint({"a": 1, "b": 2}) != manifests.fingerprint({"a": 2, "b": 1})
    text = json.dumps({"a": [1]}, separators=(",", ":"))
    assert manifests.fingerprint({"a": [1]}) == hashlib.sha256(text.encode()).hexdigest()
