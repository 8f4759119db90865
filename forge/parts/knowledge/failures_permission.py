"""Not allowed: tokens, roles, scopes, tunnels, sockets. Who lacks what, and which grant it takes.

Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
named.
"""

from __future__ import annotations

PERMISSION_SIGNATURES = r"""
== hf_licence_not_accepted | root | certain
line not in the authorized list
line (?:awaiting a review|awaiting review) from the repo authors
line Access to model (?P<model>[\w./-]+) is restricted and you are not
line answers 403 .{0,60}accept the model's licence
line \b403\b.{0,80}Cannot access gated repo
line you (?:need to|must) (?:agree to|accept) .{0,60}(?:licen[cs]e|conditions|terms)
also (?:Access to model|huggingface\.co/|ask for access to) ?(?P<model>[\w-]+/[\w.-]+)
cause The token is known (403, not 401), but its account may not read {model?this gated
  repository}: the licence was not accepted, or the request waits for review.
change act accept the licence of {model?the model} on its page, signed in as the token's owner
change act for a fine-grained token: allow reading of gated repositories
futile another way of passing the same token: it did arrive
issue skypilot-org/skypilot#2634

== hf_unauthenticated | root | certain
line \b401 (?:Client Error|Unauthorized)\b.{0,120}(?:huggingface|Request ID|gated repo)
line GatedRepoError|Cannot access gated repo
line must have access to it and be authenticated to access it
line answers 401 .{0,60}accept the model's licence
line Invalid (?:user token|credentials in Authorization header)|User access token .{0,30}expired
line (?:huggingface_hub|hf).{0,40}Token is required.{0,60}no token found
line trying to access a gated repo
near \b401\b|log ?in|[Tt]oken|authenticated|GatedRepo|gated
unless not in the authorized list|awaiting a review|\b403\b
also (?:Access to model|huggingface\.co/(?:api/models/)?) ?(?P<model>[\w-]+/[\w.-]+)
cause No valid Hugging Face token reached the process (401): {model?the repository} is gated or
  private, and the Hub does not know who asks.
change setting HF_TOKEN: not set, or not valid -> a token that may read {model?the repository},
  given to the container through the secret store (an environment variable on the host is not
  enough)
change act then accept the model's licence on its page: without it the answer is 403
futile downloading again, another mirror of the same repository
issue vllm-project/semantic-router#817

== secret_permission | root | certain
line Permission 'secretmanager\.versions\.access' denied .{0,40}(?:for resource|on resource)
  '?(?:projects/[\w-]+/secrets/(?P<secret>[\w-]+))?
line secretmanager\.versions\.access
line (?:Permission denied on secret|secret).{0,60}(?:secretAccessor|Secret Accessor)
line secretsmanager:GetSecretValue.{0,120}(?:not authorized|denied|no identity-based policy)
line not authorized to perform: secretsmanager:GetSecretValue
cause The machine's service account may not read the secret {secret?} (or secret, version or
  project are misspelt: the answer is the same).
change grant roles/secretmanager.secretAccessor: missing -> granted to the machine's service account
  on this secret (on AWS: secretsmanager:GetSecretValue in the instance profile's role)
change run gcloud secrets add-iam-policy-binding {secret} --role=roles/secretmanager.secretAccessor
  --member=serviceAccount:<service-account>
change act on Compute Engine the cloud-platform scope too; check that the secret exists
futile a new token: the secret cannot be read, whatever it holds
issue google/fuzzbench#1911; googleapis/python-secret-manager#389

== secret_missing | root | certain
line Secret \[?(?:projects/[\w-]+/secrets/)?(?P<secret>[\w-]+)(?:/versions/\w+)?\]? not found
line Secret Version \[|secret.{0,40}(?:is in (?:DESTROYED|DISABLED) state)
line ResourceNotFoundException.{0,120}[Ss]ecret
line Secrets Manager can't find the specified secret
cause The secret {secret?} (or its version) does not exist in this project or region.
change act create it with the token as its value, in the project the machine runs in
futile granting roles: there is nothing to read

== gcs_permission | root | certain
line does not have (?P<permission>storage\.[\w.]+) access
line (?P<permission>storage\.objects\.(?:get|list|create))' denied
line (?:403|AccessDenied).{0,120}(?:storage\.googleapis|gs://(?P<bucket>[\w.-]+))
line An error occurred \((?:AccessDenied|403)\) when calling the (?:GetObject|HeadObject
  |ListObjects)
cause The service account may not read the bucket {bucket?} ({permission?storage.objects.get}).
change grant roles/storage.objectViewer: missing -> granted to the service account on the bucket
change act on Compute Engine the storage scope too
futile making the bucket public

== gcsfuse_mount | root | likely
line (?:mountWithArgs|gcsfuse|fusermount).{0,160}(?:exit status 1|mount failed|failed to mount)
line running /bin/fusermount: exit status
line fusermount3?: (?:mount failed|option allow_other)
cause The FUSE mount of the bucket was refused: no storage role, not the second-generation execution
  environment of Cloud Run, or fusermount without root.
change grant roles/storage.objectViewer: missing -> granted to the service account
change flag --execution-environment: gen1 -> gen2 (or the native Cloud Storage volume mount)
futile a larger machine
issue GoogleCloudPlatform/gcsfuse#661, #3128

== iap_not_authorized | root | certain
line \[?4033: '?not authorized
line IAP.{0,60}not authorized|iap\.tunnelInstances\.accessViaIAP
cause IAP refuses the caller (4033): the account lacks the tunnel role on this instance or project.
  The firewall and the machine play no part.
change grant roles/iap.tunnelResourceAccessor: missing -> granted to the account that connects
change act check which account gcloud uses (gcloud auth list)
futile firewall rules, waiting for the boot: 4003 would mean those

== iap_backend | root | certain
line \[?4003: '?failed to connect to backend
line failed to connect to backend.{0,80}(?:port 22|Failed to connect to port)
line 4010: '?destination read failed
cause IAP let the caller in, but port 22 does not answer: the firewall lacks IAP's range
  35.235.240.0/20, or the machine or its sshd is not up yet.
change setting firewall rule: missing -> tcp:22 from 35.235.240.0/20
change act wait for the boot to end (sshd listening on port 22), then try again
futile roles: 4033 would mean those
issue terraform-google-modules/terraform-google-bastion-host#58

== iap_instance_unknown | root | certain
line \[?4047: '?Failed to lookup instance
line Failed to lookup instance
cause IAP finds no such instance (4047): wrong name, zone or project, or it is not up yet.
change place zone and name: as given -> those of the running instance (list it first)
change act wait for the machine to be RUNNING, then try again
futile roles (4033) and firewall rules (4003)

== docker_socket_permission | root | certain
line permission denied while trying to connect to the Docker (?:daemon socket|API)
line docker\.sock.{0,40}permission denied
cause The user may not talk to Docker: it is not in the group docker in this login session.
change run sudo usermod -aG docker <user>
change act start a new session afterwards (or use sudo docker): groups are read at login
futile chmod 777 on the socket: it hands root to everybody
issue kata-containers/tests#3847

== gcp_permission_denied | fault | certain
line Required '(?P<permission>[\w.]+)' permission for
line Permission '?(?P<permission>[a-z]+\.[\w.]+)'? (?:denied|missing)
line \bPERMISSION_DENIED\b|does not have permission to access (?:projects|namespaces)
line does not have (?P<permission>[a-z]+\.[a-z]+\.[a-z]+) access
cause The account lacks the permission {permission?that the message names}. It is neither quota nor
  capacity.
change grant {permission?the permission}: missing -> a role that holds it, for this account on this
  project
change act check account and project in use: gcloud auth list, gcloud config get project
futile other zones, waiting

== service_account_user | root | certain
line does not have access to service account|iam\.serviceAccounts\.actAs
line roles/iam\.serviceAccountUser
line permission to act as service account
cause The caller may not let a machine act as that service account.
change grant roles/iam.serviceAccountUser: missing -> granted to the caller on the service account
futile roles on the project's machines

== insufficient_scopes | root | certain
line insufficient authentication scopes|ACCESS_TOKEN_SCOPE_INSUFFICIENT|Insufficient Permission:
  Request had insufficient
cause The machine's access scopes exclude this API, whatever its roles.
change flag --scopes: as it is -> cloud-platform (roles decide then); needs a stopped machine
futile more roles

== api_not_enabled | root | certain
line (?P<api>[\w ]+ API) has not been used in project .{0,60}(?:before|or it is disabled)
line SERVICE_DISABLED|API \[(?P<api>[\w.]+)\] not enabled
cause The API {api?that was called} is not enabled in this project.
change act enable it: gcloud services enable (compute, tpu, run, secretmanager, iap), then wait for
  some minutes
futile roles, quota

== org_policy | root | certain
line constraints?/(?P<policy>[\w.]+)(?:'|\]|\))? (?:violated|is violated)
line violates (?:the )?(?:organization )?polic(?:y|ies)|orgpolicy.{0,40}(?:denied|violat)
cause A policy of the organisation forbids it: {policy?see the message}.
change act ask for an exception, or ask for a machine that keeps to it (no external address: use
  IAP)
futile roles of the project

== tpu_machine_not_allowed | root | certain
line user agent is not allowed to use the machine type \[?(?P<type>[\w-]+)
cause Compute Engine does not give {type?this machine type} to this project (an allow-list, not a
  quota): v5e chips come through the Cloud TPU API only.
change place API: Compute Engine -> Cloud TPU API (tpu-vm or queued resource)
futile a quota increase, other zones

== gcloud_no_account | root | certain
line do not currently have an active account selected
line Reauthentication (?:failed|required)|cannot prompt during non-interactive
line problem refreshing your current auth tokens|invalid_grant
line default credentials were not found|could not automatically determine credentials
line google\.auth\.exceptions\.(?:DefaultCredentialsError|RefreshError)
cause gcloud (or the Google client library) has no valid credentials on this computer.
change run gcloud auth login
change run gcloud auth application-default login
futile roles: nobody is asking yet

== aws_no_credentials | root | certain
line Unable to locate credentials|NoCredentialsError
line ExpiredToken(?:Exception)?\b|security token included in the request is (?:expired|invalid)
line \((?:RequestExpired|UnrecognizedClientException|SignatureDoesNotMatch)\)
line InvalidClientTokenId|AuthFailure|The SSO session .{0,60}(?:expired|invalid)
cause The AWS credentials are missing, expired or not valid.
change run aws sso login
change act or renew the access keys; check AWS_PROFILE and AWS_REGION
futile IAM policies: the caller is not known

== aws_unauthorized | fault | certain
line UnauthorizedOperation|is not authorized to perform: (?P<permission>[\w:]+)
line User: arn:\S+ is not authorized to perform(?:: (?P<permission>[\w:]+))?
line AccessDeniedException|\(AccessDenied\)
cause The AWS identity lacks {permission?the permission that the message names}.
change grant {permission?the action}: missing -> allowed in the identity's policy (an encoded
  message is read with aws sts decode-authorization-message)
futile other zones, quota

== ssh_key_refused | root | certain
line Permission denied \(publickey
line Too many authentication failures
cause sshd answers and refuses the key: OS Login is on without a role, the key is not yet on the
  machine, or the user name differs.
change grant roles/compute.osAdminLogin: missing -> granted, where OS Login is on
change act wait a minute after the first connection: keys travel through the metadata
futile firewall rules: port 22 was reached

== ssh_host_key_changed | root | certain
line REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed
cause The machine at this address shows another host key than before: it was made anew, or it is
  another machine.
change act if the machine was made anew, remove its old line (ssh-keygen -R HOST), then connect
futile StrictHostKeyChecking=no: it hides a stranger as well

== registry_denied | root | certain
line (?:denied|unauthorized): .{0,80}(?:artifactregistry|Permission .{0,40}artifactregistry)
line pull access denied for (?P<image>[\w./:-]+)
line (?:unauthorized: authentication required|no basic auth credentials|denied: requested access)
cause The registry does not let this machine pull {image?the image}: it is private, or does not
  exist.
change grant roles/artifactregistry.reader: missing -> granted to the machine's service account
change act docker login to the registry (gcloud auth configure-docker), and check the image's name
futile a larger disk, trying again

== docker_hub_licence | root | likely
line nvcr\.io.{0,120}(?:401|denied|unauthorized)|NGC.{0,40}(?:licen[cs]e|unauthorized)
cause The registry nvcr.io wants a key for this image.
change act docker login nvcr.io with an NGC key
futile trying again

== do_unauthorized | root | certain
line Unable to authenticate you|\b401\b.{0,60}digitalocean
line api\.digitalocean\.com\S*: (?:401|403)
cause DigitalOcean does not know the token, or it may not do this (expired, revoked, read only).
change setting DIGITALOCEAN_TOKEN: as it is -> a valid token with write scope
futile other regions

== file_permission | fault | likely
line PermissionError: \[Errno 13\] Permission denied: '?(?P<path>[\w./-]+)?
line (?:mkdir|open|cannot create|cannot open) .{0,120}[Pp]ermission denied
cause The process may not write or read {path?the file that the message names} as its user.
change act give the folder to the user that runs the container (--user, chown), or mount another one
futile running as root only to get past it
"""
