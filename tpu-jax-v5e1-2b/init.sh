#!/usr/bin/env bash
# Prepares a Google Cloud project for the TPU rigs, or takes back what it made (--undo).
#
# Made: APIs, one service account with two roles (writing logs; reading one secret), the secret, and
# a firewall rule that lets Google's Identity-Aware Proxy reach port 22. It creates no machine, and
# what it makes costs cents a month. Running it again changes nothing that is right already.
# The token goes to gcloud through a pipe: it stands in no argument and in no output.

set -euo pipefail
set +x # also under `bash -x`: this script holds a token
export CLOUDSDK_CORE_DISABLE_PROMPTS=1 CLOUDSDK_CORE_VERBOSITY=warning TERM=dumb
token="${HF_TOKEN:-}"
unset HF_TOKEN # gcloud need not inherit it

MARK="gemma4-rigs"
APIS="compute.googleapis.com tpu.googleapis.com secretmanager.googleapis.com \
logging.googleapis.com iap.googleapis.com iam.googleapis.com cloudresourcemanager.googleapis.com"
IAP_RANGE="35.235.240.0/20" # the addresses that IAP tunnels come from (Google's IAP documentation)
WAIT_S="${GEMMA4_INIT_WAIT_S:-5}"

project="" account="gemma4-rig" secret="hf-token" token_file="" network="default"
dry_run=0 yes=0 undo=0 enabled_apis=""

usage() {
  cat <<'TEXT'
usage: ./init.sh --project ID [flags]
  --project ID            the project; asked for where a terminal is there
  --service-account NAME  the machines' account (default gemma4-rig)
  --secret NAME           the secret with the Hugging Face token (default hf-token)
  --hf-token-file FILE    file of mode 0600 that holds the token; or set HF_TOKEN
  --network NAME          the network whose port 22 IAP may reach (default "default")
  --dry-run               look only, and print what would be run
  --yes                   ask nothing
  --undo                  remove what this script made; asks, unless --yes
TEXT
}

say() { printf '%s\n' "$*"; }
fail() {
  printf 'init.sh: %s\n' "$1" >&2
  [[ -z ${2:-} ]] || printf 'Next: %s\n' "$2" >&2
  exit "${3:-1}"
}
at_terminal() { [[ -t 0 ]]; }
agreed() { # agreed QUESTION: yes by flag, or as a person answers
  [[ $yes -eq 1 ]] && return 0
  local answer=""
  read -r -p "$1 [y/N] " answer || true
  [[ $answer == [yY]* ]]
}

# Every command names its project: an ambient one must not be the one that changes.
ask() { gcloud "$@" --project="$project" --quiet </dev/null; }
ask_quietly() { ask "$@" 2>/dev/null; }
change() { # runs a change, or prints it
  if [[ $dry_run -eq 1 ]]; then
    printf '  would run: gcloud'
    printf ' %q' "$@" "--project=$project"
    printf '\n'
  else
    ask "$@" >/dev/null
  fi
}
change_patiently() { # a new service account is not known everywhere at once
  local left=6
  until change "$@"; do
    left=$((left - 1))
    [[ $left -gt 0 ]] || fail "gcloud $1 $2 was refused again and again" "read gcloud's words above"
    say "  again in $WAIT_S s (a new account needs some time to be known) ..."
    sleep "$WAIT_S"
  done
}

read_flags() {
  while [[ $# -gt 0 ]]; do
    case $1 in
      --dry-run) dry_run=1 ;;
      --yes) yes=1 ;;
      --undo) undo=1 ;;
      -h | --help) usage && exit 0 ;;
      --project | --service-account | --secret | --hf-token-file | --network)
        [[ $# -ge 2 ]] || fail "$1 needs a value" "./init.sh --help" 2
        case $1 in
          --project) project=$2 ;;
          --service-account) account=$2 ;;
          --secret) secret=$2 ;;
          --hf-token-file) token_file=$2 ;;
          --network) network=$2 ;;
        esac
        shift
        ;;
      *) fail "unknown flag: $1" "./init.sh --help" 2 ;;
    esac
    shift
  done
  if [[ -z $project ]] && at_terminal && [[ $yes -eq 0 ]]; then
    read -r -p "Project id: " project || true
  fi
  local form='^[a-z][a-z0-9-]{4,28}[a-z0-9]$'
  [[ $project =~ $form ]] || fail "--project must be the id of a project" "./init.sh --project ID" 2
  [[ $account =~ $form ]] || fail "--service-account must be 6 to 30 of a-z, 0-9 and -" "" 2
  [[ $secret =~ ^[A-Za-z0-9_-]{1,255}$ ]] || fail "--secret must be letters, digits, - and _" "" 2
  [[ $network =~ ^[a-z]([-a-z0-9]{0,44}[a-z0-9])?$ ]] ||
    fail "--network must be a network's name" "" 2
  email="$account@$project.iam.gserviceaccount.com"
  rule="$MARK-iap-$network"
}

read_token() {
  if [[ -n $token_file ]]; then
    check_token_file
    token=$(<"$token_file")
  fi
  if [[ -z $token && $yes -eq 0 && $dry_run -eq 0 ]] && at_terminal && ! secret_has_version; then
    read -r -s -p "Hugging Face token (not shown; empty: later): " token || true
    printf '\n'
  fi
  token="${token//[$' \t\r\n']/}"
  [[ -z $token || $token =~ ^hf_[A-Za-z0-9_-]{8,500}$ ]] ||
    fail "what was given is no Hugging Face token (hf_ and letters or digits)" "" 2
}

check_token_file() {
  local mode
  [[ ! -L $token_file && -f $token_file && -O $token_file && -r $token_file ]] ||
    fail "--hf-token-file must be a plain file of yours, and no link" "" 2
  mode=$(ls -ld -- "$token_file")
  [[ ${mode:4:6} == "------" ]] ||
    fail "--hf-token-file is open to others (${mode:0:10})" "chmod 600 on it" 2
}

check_login() {
  command -v gcloud >/dev/null ||
    fail "gcloud is not installed" "https://cloud.google.com/sdk/docs/install"
  local who
  who=$(gcloud auth list --filter=status:ACTIVE --format="value(account)" </dev/null) || who=""
  [[ -n $who ]] || fail "gcloud has no login" "gcloud auth login"
  ask projects describe "$project" --format="value(projectNumber)" >/dev/null ||
    fail "there is no project $project, or $who may not see it" "gcloud projects list"
  say "Project $project, as $who."
  if ! gcloud auth application-default print-access-token --quiet </dev/null >/dev/null 2>&1; then
    say "Note: there are no application-default credentials, which the rig's tools for secrets and"
    say "      logs use. Another login than gcloud's own: gcloud auth application-default login"
  fi
}

# -- what is there

api_enabled() { [[ " $enabled_apis " == *" $1 "* ]]; }
read_apis() {
  enabled_apis=$(ask services list --enabled --format="value(config.name)") ||
    fail "the enabled APIs of $project cannot be read" "a role such as roles/owner on the project"
  enabled_apis=$(printf '%s' "$enabled_apis" | tr '\n' ' ')
}
account_mark() {
  ask_quietly iam service-accounts describe "$email" --format="value(description)"
}
secret_mark() {
  api_enabled secretmanager.googleapis.com || return 1
  ask_quietly secrets describe "$secret" --format="value(labels.managed-by)"
}
secret_has_version() {
  local found
  found=$(secret_mark >/dev/null && ask_quietly secrets versions list "$secret" \
    --filter="state:ENABLED" --limit=1 --format="value(name)") || return 1
  [[ -n $found ]]
}
rule_facts() {
  api_enabled compute.googleapis.com || return 1
  local form="description,network.basename(),sourceRanges.list()"
  form="$form,allowed[].map().firewall_rule().list()"
  ask_quietly compute firewall-rules describe "$rule" --format="value($form)"
}
has_role() { # has_role ROLE RESOURCE...: whether the account has it there
  local role=$1 found
  shift
  found=$(ask_quietly "$@" --flatten="bindings[].members" --format="value(bindings.role)" \
    --filter="bindings.members:serviceAccount:$email") || return 1
  [[ $'\n'"$found"$'\n' == *$'\n'"$role"$'\n'* ]]
}

# -- making

enable_apis() {
  local api missing=""
  for api in $APIS; do
    api_enabled "$api" || missing="$missing $api"
  done
  if [[ -z $missing ]]; then
    say "APIs: all enabled."
    return
  fi
  say "APIs:$missing are being enabled (a minute or two)."
  # shellcheck disable=SC2086  # one argument each
  change services enable $missing
  [[ $dry_run -eq 1 ]] || read_apis
}

make_account() {
  local mark
  if mark=$(account_mark); then
    say "Service account $email: there${mark:+ ($mark)}."
  else
    say "Service account $email: is being made."
    change iam service-accounts create "$account" --display-name="Gemma 4 rigs" \
      --description="managed-by=$MARK"
  fi
  if has_role roles/logging.logWriter projects get-iam-policy "$project"; then
    say "Role roles/logging.logWriter on the project: there."
  else
    say "Role roles/logging.logWriter on the project: is being granted."
    change_patiently projects add-iam-policy-binding "$project" \
      --member="serviceAccount:$email" --role=roles/logging.logWriter --condition=None
  fi
}

make_secret() {
  local mark
  if mark=$(secret_mark); then
    [[ $mark == "$MARK" ]] ||
      fail "the secret $secret is somebody else's: it lacks the label managed-by=$MARK" \
        "--secret with another name, or: gcloud secrets update $secret --project=$project \
--update-labels=managed-by=$MARK"
    say "Secret $secret: there."
  else
    say "Secret $secret: is being made."
    change secrets create "$secret" --replication-policy=automatic --labels="managed-by=$MARK"
  fi
  add_token
  if has_role roles/secretmanager.secretAccessor secrets get-iam-policy "$secret"; then
    say "Role roles/secretmanager.secretAccessor on $secret alone: there."
  else
    say "Role roles/secretmanager.secretAccessor on $secret alone: is being granted."
    change_patiently secrets add-iam-policy-binding "$secret" \
      --member="serviceAccount:$email" --role=roles/secretmanager.secretAccessor
  fi
}

add_token() {
  if [[ -z $token ]]; then
    secret_has_version ||
      say "  it has no version yet: run this again with --hf-token-file, or call save_hf_token"
    return 0
  fi
  if [[ $dry_run -eq 1 ]]; then
    say "  would add the given token as its newest version, unless it is that already"
  elif [[ $(newest_token) == "$token" ]]; then
    say "  its newest version is the given token already."
  else
    # printf is the shell's own: the token becomes nobody's argument.
    printf '%s' "$token" |
      gcloud secrets versions add "$secret" --data-file=- --project="$project" --quiet >/dev/null
    say "  the token was added as its newest version."
  fi
}
newest_token() {
  ask_quietly secrets versions access latest --secret="$secret" || true
}

open_port() {
  local facts want
  want="managed-by=$MARK"$'\t'"$network"$'\t'"$IAP_RANGE"$'\t'"tcp:22"
  if facts=$(rule_facts); then
    [[ $facts == "$want" ]] ||
      fail "the firewall rule $rule is not as this script makes it: $facts" \
        "a person looks at it: gcloud compute firewall-rules describe $rule --project=$project"
    say "Firewall rule $rule: there."
    return
  fi
  if [[ $dry_run -eq 0 ]]; then
    ask_quietly compute networks describe "$network" --format="value(name)" >/dev/null ||
      fail "there is no network $network in $project" \
        "--network with a name of: gcloud compute networks list --project=$project"
  fi
  say "Firewall rule $rule (IAP to port 22 of $network): is being made."
  change compute firewall-rules create "$rule" --network="$network" --direction=INGRESS \
    --action=ALLOW --rules=tcp:22 --source-ranges="$IAP_RANGE" --description="managed-by=$MARK"
}

hints() {
  cat <<TEXT
Done. In the rig's tpu.env:
  PROJECT=$project
  SERVICE_ACCOUNT=$email
  HF_SECRET=$secret
  NETWORK=$network
Whoever runs the rig needs roles/iap.tunnelResourceAccessor, and roles/iam.serviceAccountUser on
$email; an owner of the project may do both.
Budget: BUDGET_USD in tpu.env is a limit of the rig alone. An alert of Google's own, which stops
nothing, is made under Billing, Budgets & alerts in the console.
TEXT
}

# -- undoing

what_is_ours() { # the names of what --undo would remove, one a line
  local facts
  facts=$(rule_facts) && [[ $facts == "managed-by=$MARK"$'\t'* ]] && say "firewall rule $rule"
  [[ $(secret_mark) == "$MARK" ]] && say "secret $secret with all its versions, for good"
  [[ $(account_mark) == "managed-by=$MARK" ]] && say "service account $email and its two roles"
  return 0
}

refuse_while_rented() {
  api_enabled compute.googleapis.com || return 0
  local found
  found=$(ask compute instances list --filter="labels.managed-by=$MARK" --format="value(name)") ||
    fail "it cannot be read whether a rig rents a machine; nothing was removed"
  [[ -z $found ]] ||
    fail "a rig still rents: $(printf '%s' "$found" | tr '\n' ' ')" "destroy it with its tools"
}

take_back() {
  local ours
  ours=$(what_is_ours)
  if [[ -z $ours ]]; then
    say "Nothing here was made by this script."
    return
  fi
  say "To be removed:"
  printf '  %s\n' "${ours//$'\n'/$'\n'  }"
  say "APIs stay enabled: others may use them, and they cost nothing."
  refuse_while_rented
  if [[ $dry_run -eq 0 && $yes -eq 0 ]]; then
    at_terminal || fail "nothing was removed: there is no terminal to ask at" "--yes" 2
    agreed "Remove them?" || fail "nothing was removed"
  fi
  if [[ $ours == *"firewall rule"* ]]; then
    change compute firewall-rules delete "$rule"
  fi
  if [[ $ours == *"secret $secret"* ]]; then
    change secrets delete "$secret"
  fi
  if [[ $ours == *"service account"* ]]; then
    if has_role roles/logging.logWriter projects get-iam-policy "$project"; then
      change projects remove-iam-policy-binding "$project" --member="serviceAccount:$email" \
        --role=roles/logging.logWriter --condition=None
    fi
    change iam service-accounts delete "$email"
  fi
  say "Removed."
}

main() {
  read_flags "$@"
  check_login
  read_apis
  if [[ $undo -eq 1 ]]; then
    take_back
    return
  fi
  read_token
  if [[ $dry_run -eq 0 ]] && at_terminal; then
    agreed "Prepare $project (service account $account, secret $secret, network $network)?" ||
      fail "nothing was changed"
  fi
  enable_apis
  make_account
  make_secret
  open_port
  hints
}

main "$@"
