"""`aws s3 sync` and `cp` of a fake machine: between a folder of it and a bucket of the fake AWS.

Works on moto's own buckets, so that whoever looks through boto3 finds what a machine left there.
"""

from __future__ import annotations

import os
from calendar import timegm
from pathlib import Path
from typing import Any

from forge.suites.fake_aws import FakeAws


def copy_bucket(cloud: FakeAws, verb: str, source: str, target: str) -> dict[str, Any]:
    """Copies; `done` are the lines that the program prints, `message` why it could not."""
    far = source if source.startswith("s3://") else target
    bucket, _, key = far.removeprefix("s3://").partition("/")
    with cloud.lock:
        backend = cloud.moto.buckets()
        if bucket not in backend.buckets:
            operation = "ListObjectsV2" if verb == "sync" else "PutObject"
            if verb == "cp" and far == source:
                operation = "HeadObject"
            what = f"An error occurred (NoSuchBucket) when calling the {operation} operation: "
            return {"message": f"{what}The specified bucket does not exist"}
        if verb == "cp":
            return _copy_one(backend, bucket, key, source, target)
        prefix = f"{key.rstrip('/')}/" if key else ""
        if far == target:
            return {"done": _upload(backend, bucket, prefix, Path(source))}
        return {"done": _download(backend, bucket, prefix, Path(target))}


def _copy_one(backend: Any, bucket: str, key: str, source: str, target: str) -> dict[str, Any]:
    if target.startswith("s3://"):
        backend.put_object(bucket, key, Path(source).read_bytes())
        return {"done": [f"upload: {source} to {target}"]}
    found = backend.get_object(bucket, key)
    if found is None:
        words = "An error occurred (404) when calling the HeadObject operation: "
        return {"message": f'{words}Key "{key}" does not exist'}
    Path(target).write_bytes(found.value)
    return {"done": [f"download: {source} to {target}"]}


def _objects(backend: Any, bucket: str, prefix: str) -> dict[str, Any]:
    """moto's objects below `prefix`, by the rest of their keys."""
    keys = [one for one in list(backend.buckets[bucket].keys.keys()) if one.startswith(prefix)]
    return {key.removeprefix(prefix): backend.get_object(bucket, key) for key in keys}


def _changed_at(stored: Any) -> int:
    """When an object was written, in whole Unix seconds, which is all that S3 tells."""
    return timegm(stored.last_modified.timetuple())


def _upload(backend: Any, bucket: str, prefix: str, folder: Path) -> list[str]:
    """What is missing, of another size, or newer here than there, as sync has it (awscli 1.46.3,
    s3/syncstrategy/base.py); nothing is deleted."""
    known, done = _objects(backend, bucket, prefix), []
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = path.relative_to(folder).as_posix()
        stored, data = known.get(name), path.read_bytes()
        same = stored is not None and len(stored.value) == len(data)
        if not same or path.stat().st_mtime > _changed_at(stored):
            backend.put_object(bucket, prefix + name, data)
            done.append(f"upload: {path} to s3://{bucket}/{prefix}{name}")
    return done


def _download(backend: Any, bucket: str, prefix: str, folder: Path) -> list[str]:
    """The same the other way: here, too, what is newer on this side is replaced."""
    done = []
    for name, stored in sorted(_objects(backend, bucket, prefix).items()):
        path, at = folder / name, _changed_at(stored)
        same = path.exists() and path.stat().st_size == len(stored.value)
        if not same or path.stat().st_mtime > at:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(stored.value)  # with the usual mode: a bucket keeps none
            os.utime(path, (at, at))
            done.append(f"download: s3://{bucket}/{prefix}{name} to {path}")
    return done
