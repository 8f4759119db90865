# Exports the rig's values as server.py read them (environment over tpu.env over default):
#
#     source set_env.sh        in bash or zsh, from anywhere
#
# tpu.env itself is not shell: sourcing it would take the quotes out of its values.

_rig_env() {
    if [ -z "$1" ]; then
        echo "set_env.sh: only bash and zsh can source it" >&2
        return 1
    fi
    case $1 in
        */*) _rig_folder=${1%/*} ;;
        *) _rig_folder=. ;;
    esac
    if ! _rig_values=$("${PYTHON:-python3}" "$_rig_folder/launch.py" env); then
        echo "set_env.sh: nothing was exported" >&2
        return 1
    fi
    eval "$_rig_values"
}

# What follows must not exit: when sourced, that would be the end of the user's shell.
if [ -n "${BASH_VERSION:-}" ]; then
    # In eval, because other shells cannot even read these two words.
    eval '_rig_file=${BASH_SOURCE[0]}'
    [ "$_rig_file" != "$0" ] && _rig_sourced=1 || _rig_sourced=
elif [ -n "${ZSH_VERSION:-}" ]; then
    eval '_rig_file=${(%):-%x}'
    case ${ZSH_EVAL_CONTEXT:-} in *:file*) _rig_sourced=1 ;; *) _rig_sourced= ;; esac
else
    _rig_file= _rig_sourced=1
fi

if [ -n "$_rig_sourced" ]; then
    _rig_env "$_rig_file"
    _rig_status=$?
else
    echo "set_env.sh must be sourced, or its values die with it: source $_rig_file" >&2
    _rig_status=1
fi

unset -f _rig_env
unset _rig_file _rig_folder _rig_sourced _rig_values
# Gives the status in both cases: executed, the last command's status is the script's.
eval "unset _rig_status; (exit $_rig_status)"
