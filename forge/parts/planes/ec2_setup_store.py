"""What a rig keeps in an AWS account between machines: a bucket for its cache, the token's secret.

Knows its own by the mark. Changes nothing by itself, and makes no secret: save_hf_token does.
"""

from __future__ import annotations

from typing import Any

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.boundaries.aws_secrets import aws_secret_state
from forge.parts.ground.errors import RigError
from forge.parts.planes.capacity_plane import MANAGED_BY
from forge.parts.planes.ec2_setup_acts import SETUP_TAGS, SetupCall, SetupLook, SetupWish

SECRET_RECOVERY_DAYS = 7  # the shortest that Secrets Manager offers; it bills none of them
_OBJECTS_AT_ONCE = 1000  # DeleteObjects takes no more


class SetupStore:
    """Looks at the bucket and at the secret."""

    def __init__(self, aws: Aws, wish: SetupWish) -> None:
        self._aws = aws
        self._wish = wish

    def _s3(self, operation: str, **parameters: Any) -> SetupCall:
        wish = self._wish
        named = {"Bucket": wish.bucket, **parameters}
        if operation != "create_bucket":
            named["ExpectedBucketOwner"] = wish.account  # names of buckets are everybody's
        return SetupCall("s3", wish.region, operation, named)

    async def _bucket_is_ours(self) -> bool | None:
        """None where there is no such bucket. Raises DENIED for one of another account."""
        call = self._s3("get_bucket_tagging")
        try:
            answer = await self._aws.read(
                *(call.service, call.region, call.operation), **dict(call.parameters)
            )
        except RigError as error:
            if "NoSuchTagSet" in error.what:
                return False
            if error.error_class == "NOT_FOUND":
                return None
            raise
        return {"Key": "managed-by", "Value": MANAGED_BY} in answer.get("TagSet", [])

    async def look(self, found: SetupLook) -> None:
        """Into `found`: whether the bucket is there, or how it would be made."""
        name, region = self._wish.bucket, self._wish.region
        ours = await self._bucket_is_ours()
        if ours:
            found.there.append(f"bucket {name}")
        elif ours is not None:
            # Somebody's own may serve as the cache; it is not made to look like one of ours.
            found.there.append(f"bucket {name}, which is not marked as made here and stays so")
        else:
            # us-east-1 is S3's default, and refuses to be named.
            place = {"LocationConstraint": region}
            where = {} if region == "us-east-1" else {"CreateBucketConfiguration": place}
            closed = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy")
            block = dict.fromkeys((*closed, "RestrictPublicBuckets"), True)
            rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
            found.act(
                f"bucket {name} in {region}, private and encrypted",
                self._s3("create_bucket", **where),
                self._s3("put_bucket_tagging", Tagging={"TagSet": list(SETUP_TAGS)}),
                self._s3("put_public_access_block", PublicAccessBlockConfiguration=block),
                self._s3(
                    "put_bucket_encryption", ServerSideEncryptionConfiguration={"Rules": [rule]}
                ),
            )

    async def look_back(self, found: SetupLook) -> None:
        """Into `found`: what would be removed of bucket and secret, and what stays."""
        if self._wish.bucket:
            await self._bucket_back(found)
        if self._wish.secret:
            await self._secret_back(found)

    async def _bucket_back(self, found: SetupLook) -> None:
        name, own = self._wish.bucket, f"{self._wish.rig}/"
        ours = await self._bucket_is_ours()
        if ours is None:
            return
        if not ours:
            found.there.append(f"bucket {name}: it is not marked as made here")
            return
        call = self._s3("list_objects_v2")
        objects = await self._aws.read_all(
            *(call.service, call.region, call.operation, "Contents"), **dict(call.parameters)
        )
        keys = [str(one["Key"]) for one in objects if str(one["Key"]).startswith(own)]
        calls = [
            self._s3(
                "delete_objects",
                Delete={"Objects": [{"Key": key} for key in keys[at : at + _OBJECTS_AT_ONCE]]},
            )
            for at in range(0, len(keys), _OBJECTS_AT_ONCE)
        ]
        if len(keys) == len(objects):
            words = f"bucket {name} with its {len(keys)} files, for good"
            found.act(words, *calls, self._s3("delete_bucket"))
            return
        if keys:
            found.act(f"{len(keys)} files below {own} in the bucket {name}, for good", *calls)
        others = len(objects) - len(keys)
        found.there.append(f"bucket {name}: {others} files in it are not this rig's")

    async def _secret_back(self, found: SetupLook) -> None:
        name, region = self._wish.secret, self._wish.region
        try:
            state = await aws_secret_state(self._aws, region, name, MANAGED_BY)
        except RigError as error:
            if error.error_class == "NOT_FOUND" or "waits for its deletion" in error.what:
                return
            raise
        if not state.ours:
            found.there.append(f"secret {name} in {region}: it is not marked as made here")
            return
        gone = {"SecretId": state.arn, "RecoveryWindowInDays": SECRET_RECOVERY_DAYS}
        found.act(
            f"secret {name} in {region}, which can be brought back for {SECRET_RECOVERY_DAYS} days",
            SetupCall("secretsmanager", region, "delete_secret", gone),
        )
