# shellcheck shell=bash
# Sourced by the commands beside it: the checkout's root, and virtual environments that are made
# when they are missing and brought up to date when pyproject.toml or constraints.txt has changed.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

# A developer's interpreter settings must not decide what is tested or measured: without cached
# bytecode, for one, every child would compile the package again when it starts.
unset PYTHONDONTWRITEBYTECODE PYTHONHOME PYTHONOPTIMIZE PYTHONPATH PYTHONUNBUFFERED PYTHONWARNINGS

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Prints the real path of an interpreter that runs, is of version $2 (3.11 or newer when not
# given) and can make environments. A pyenv shim exists for versions that are not switched on:
# existing is not running.
python_path() {
    "$1" - "${2-}" 2>/dev/null <<'PY'
import ensurepip, sys, venv
version = "%d.%d" % sys.version_info[:2]
if sys.argv[1] and sys.argv[1] != version or sys.version_info < (3, 11):
    sys.exit(1)
print(sys.executable)
PY
}

# Prints an interpreter for the main environment: $PYTHON if set, else the newest tested one.
choose_python() {
    local candidate
    if [[ -n ${PYTHON-} ]]; then
        python_path "$PYTHON" || die "PYTHON=$PYTHON does not run, is older than 3.11, or lacks venv"
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3; do
        python_path "$candidate" && return
    done
    die "no Python 3.11 or newer with venv and ensurepip found; set PYTHON to one"
}

# Prints an interpreter of version $1 from the PATH or from pyenv; fails when there is none.
find_python() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        python_path "$candidate" "$1" && return
    done
    return 1
}

# environment DIR EXTRA [PYTHON]: makes sure that DIR holds this checkout with an extra (`base`
# for none), and sets VENV. Extras add up. Costs nothing when there is nothing to do.
environment() {
    VENV="$ROOT/$1"
    local extra="$2" interpreter="${3-}"
    # What must be as it was at the last install. The root is part of it, for an environment
    # that was copied with its checkout belongs to the other one.
    local wanted stamp="$VENV/.installed-$extra"
    wanted="$ROOT"$'\n'"$(<"$ROOT/pyproject.toml")$(<"$ROOT/constraints.txt")"
    _is_installed && return
    {
        # The lock is on pyproject.toml, which is there before the environment is.
        flock 9
        if ! _is_installed; then
            _install 9>&-
        fi
    } 9<"$ROOT/pyproject.toml"
}

# `pip install .` into this environment would replace the checkout by a copy of it.
_is_installed() {
    compgen -G "$VENV/lib/python*/site-packages/_editable_impl_capsule_tasks.pth" >/dev/null &&
        [[ -x $VENV/bin/python && -r $stamp && "$(<"$stamp")" == "$wanted" ]]
}

_install() {
    local target="${ROOT}[$extra]" covered=(base "$extra")
    case $extra in
        base) target="$ROOT" ;;
        # A test that calls scripts/redis must not cause an install under the others' feet.
        dev) covered+=(blobs console embedded encryption flower) ;;
    esac
    echo "installing capsule_tasks ($extra) into ${VENV#"$ROOT/"} …" >&2
    make_venv "$interpreter"
    # For the packages and for the build backend: a release of another project changes nothing here.
    # By variables, since pip has had an option for the build for a short time only.
    UV_CONSTRAINT=constraints.txt UV_BUILD_CONSTRAINT=constraints.txt \
        PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
        pip_install -e "$target"
    for extra in "${covered[@]}"; do
        printf '%s' "$wanted" >"$VENV/.installed-$extra"
    done
}

# Makes sure that $VENV is an environment of this checkout; a new one is of interpreter $1, if given.
make_venv() {
    _belongs_here && return
    local interpreter
    interpreter="${1:-$(choose_python)}" || exit 1
    rm -rf "$VENV"
    "$interpreter" -m venv "$VENV" || die "$interpreter could not make $VENV"
    echo "$ROOT" >"$VENV/.root"
}

# Installs into $VENV, with uv if it is on the PATH, else with pip; the arguments suit both.
pip_install() {
    local log="$VENV/install.log" command=("$VENV/bin/python" -m pip install)
    if command -v uv >/dev/null; then
        command=(uv pip install --python "$VENV/bin/python" --compile-bytecode)
    fi
    # Where constraints.txt is: a path with a space in it cannot be given to pip.
    (cd "$ROOT" && "${command[@]}" "$@") >"$log" 2>&1 || {
        cat "$log" >&2
        die "the install failed; its output is above and in $log"
    }
}

# latest_environment DIR: makes DIR from scratch, with this checkout and the newest release of each
# package that the tests need, whatever constraints.txt and the upper bounds in pyproject.toml say.
# Sets VENV.
latest_environment() {
    VENV="$ROOT/$1"
    echo "installing the newest releases into $1 …" >&2
    rm -rf "$VENV"
    make_venv
    "$VENV/bin/python" -P "$ROOT/scripts/_latest.py" requirements >"$VENV/requirements.txt"
    pip_install --upgrade -r "$VENV/requirements.txt"
    pip_install --no-deps -e "$ROOT"
}

_belongs_here() {
    [[ -r $VENV/.root && "$(<"$VENV/.root")" == "$ROOT" ]] && "$VENV/bin/python" -c '' 2>/dev/null
}

# Makes sure of a headless Chromium and its driver, from Debian's packages, where this user may
# install them. Elsewhere it says so: the tests of Flower are then skipped, and fail in CI.
browser() {
    command -v chromium >/dev/null && command -v chromedriver >/dev/null && return
    local log="$VENV/browser.log"
    if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
        echo "no Chromium here: install the packages chromium and chromium-driver" >&2
        return
    fi
    echo "installing chromium and chromium-driver …" >&2
    {
        apt-get update && DEBIAN_FRONTEND=noninteractive \
            apt-get install --yes --no-install-recommends chromium chromium-driver
    } >"$log" 2>&1 </dev/null || echo "they could not be installed; see $log" >&2
}
