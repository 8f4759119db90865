"""The tools that only an AWS account has: its secret.

Knows the token by where a person puts it, and no machine.
"""

from __future__ import annotations

from typing import cast

from pydantic import Field

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.boundaries.aws_secrets import SavedAwsSecret, save_aws_secret
from forge.parts.boundaries.hf_token import read_hf_token
from forge.parts.ground.results import Outcome
from forge.parts.planes.capacity_plane import MANAGED_BY
from forge.parts.planes.ec2_settings import Ec2Settings, ec2_home_region
from forge.parts.toolsets.rental_costs import CostToolset, secret_name
from forge.parts.toolsets.toolset import rig_tool


class SavedAwsTokenOutcome(Outcome):
    """Where the token lies now. Never the token."""

    account: str
    region: str
    secret: str
    version: str = Field(description="The id of the version that was added; machines read it.")
    made: bool = Field(description="The secret itself was made by this call.")
    taken_from: str


class AwsProjectToolset(CostToolset):
    """The token of the machines, and what one would cost."""

    @rig_tool(title="Save the Hugging Face token", effect="changes")
    async def save_hf_token(self) -> SavedAwsTokenOutcome:
        """Put the Hugging Face token of this computer into the account's Secrets Manager, in the
        region of the first of ZONES, from where {place} fetches it at boot. Takes no token: it
        reads HF_TOKEN of this server's environment, else the file (mode 0600) that HF_TOKEN_FILE in
        tpu.env names; a person puts it there, never into a chat. Makes the secret if it is missing,
        adds a version, deletes nothing. Costs 0.40 USD a month."""
        settings = cast(Ec2Settings, self.context.settings)
        token, origin = read_hf_token(str(getattr(settings, "hf_token_file", "")))
        region, secret = ec2_home_region(settings), secret_name(settings)
        labels = {"managed-by": MANAGED_BY, "rig": self.context.rig, "owner": self.context.owner}
        aws = Aws(settings.aws_account, settings.aws_profile)
        saved = await save_aws_secret(aws, region, secret, token, labels)
        self.context.journal.append("secret saved", secret=secret, version=saved.state.current)
        return self._saved(saved, origin)

    def _saved(self, saved: SavedAwsSecret, origin: str) -> SavedAwsTokenOutcome:
        state, how = saved.state, "the secret is new" if saved.made else "its former version stays"
        return SavedAwsTokenOutcome(
            summary=f"The secret {state.name} in {state.region} holds the token ({how}).",
            next_step=f"find_{self.context.vocabulary['hardware']}()",
            account=self.context.settings.project,  # type: ignore[attr-defined]  # Ec2Settings
            region=state.region,
            secret=state.name,
            version=state.current,
            made=saved.made,
            taken_from=origin,
        )
