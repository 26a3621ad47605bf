"""The only module that reads environment variables. Values are typed, and errors name the variable and its value."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.numbers import decimal, whole
from gemmtuned.configs.value_class import value_class

_stat = os.stat  # a program may replace it, or os.path.exists, for a test of its own

RELOADS: Final = ("auto", "start", "manual")
_KILL_SWITCH: Final = "disabled"  # in the home
MANIFEST: Final = "manifest.json"  # in config_dir, where something is published: see manifest.py


@value_class
class UserTables:
    """The tables that one AITER_CONFIG_* variable names, in its order."""

    variable: str
    family: str
    paths: tuple[Path, ...]


@value_class(kw_only=True)
class Settings:
    """Everything that the environment decides, read once."""

    capture: bool = False
    dispatch: bool = False
    disabled: bool = False
    reload: str = "auto"
    reload_by_ranks: bool = True  # `reload` was not set: auto, until this proves to be one of several ranks
    rank: int | None = None  # from the launcher
    home: Path
    db: Path
    config_dir: Path
    cache: Path
    device_locks: Path = Path("/run/lock")
    trust: str = ""
    run: str = "python"
    idle_s: float = 10.0
    flush_s: float = 1.0
    batch_invariant: bool = False  # by our own variable; `batch_invariance` reads the engines' variables, too
    native: bool = True
    tables: tuple[UserTables, ...] = ()
    log_tuned: bool = False
    quiet: bool = False
    live_check: int = 0  # one routed call in this many; 0: none
    graph_wait_s: float = 5.0
    sync: str = ""  # the URL at which the daemon shares results
    sync_name: str = ""
    sync_key: Path | None = None
    sync_hosts: tuple[str, ...] = ()
    recapture: str = "off"
    patches: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # names, or patterns of them, of what the daemon's workers do without

    @property
    def locks(self) -> Path:
        """Folder of lock files."""
        return self.home / "locks"

    @property
    def ingest(self) -> Path:
        """Where programs of other users leave their counts; it exists in a shared home."""
        return self.home / "ingest" / "ingest.db"

    @property
    def counts(self) -> tuple[Path, Path]:
        """(database, folder of its lock file) that this process writes its counts to.

        This is the home's database, unless the home is another user's and has a folder for such counts.
        """
        shared = self.ingest.parent
        if self.db == self.home / "tune.db" and shared.is_dir() and self.home.stat().st_uid != os.geteuid():
            return self.ingest, shared
        return self.db, self.locks

    @property
    def kill_switch(self) -> Path:
        """While this file exists, running processes use stock torch for everything."""
        return self.home / _KILL_SWITCH

    @property
    def switched_off(self) -> bool:
        """Whether the kill switch exists; False in a home that we may not read."""
        try:
            _stat(f"{self.home}/{_KILL_SWITCH}")  # asked each second, and a Path takes longer than the file
        except OSError:
            return False
        return True

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read what configs/variables.py lists. Raises SettingError that names each wrong variable and its value."""
        env = os.environ if env is None else env
        try:
            return cls._read(env)
        except SettingError as err:
            raise SettingError("; ".join(wrong_variables(env).values()) or str(err)) from err

    @classmethod
    def _read(cls, env: Mapping[str, str]) -> Settings:
        tune = _switch(env)
        home = _path(env, "GEMMTUNED_HOME") or _default_home(env)
        for name, words in (("GEMMTUNED_RELOAD", RELOADS), ("GEMMTUNED_RECAPTURE", ("idle", "off"))):
            if env.get(name, "") not in ("", *words):
                raise SettingError(f"{name} must be one of {', '.join(words)}, got {env[name]!r}")
        return cls(
            capture=tune,
            dispatch=_flag(env, "GEMMTUNED_DISPATCH", default=tune),
            disabled=_flag(env, "GEMMTUNED_DISABLE") or _flag(env, "AITER_BYPASS_TUNE_CONFIG"),
            reload=env.get("GEMMTUNED_RELOAD") or ("start" if _ranks(env) > 1 else "auto"),
            reload_by_ranks=not env.get("GEMMTUNED_RELOAD"),
            rank=_number(env, "RANK") if _ranks(env) > 1 else None,
            home=home,
            db=_path(env, "GEMMTUNED_DB") or home / "tune.db",
            config_dir=_path(env, "GEMMTUNED_CONFIG_DIR") or home / "configs",
            cache=_path(env, "GEMMTUNED_CACHE") or _user_folder(env, "XDG_CACHE_HOME", ".cache") or home / "cache",
            device_locks=_path(env, "GEMMTUNED_DEVICE_LOCKS") or _shared_locks(),
            trust=env.get("GEMMTUNED_TRUST", ""),
            run=_printable(env.get("GEMMTUNED_RUN") or _program())[:200],
            idle_s=_seconds(env, "GEMMTUNED_IDLE_S", 10.0),
            flush_s=_seconds(env, "GEMMTUNED_FLUSH_S", 1.0),
            batch_invariant=_flag(env, "GEMMTUNED_BATCH_INVARIANT"),
            native=_flag(env, "GEMMTUNED_NATIVE", default=True),
            tables=_tables(env),
            log_tuned=_flag(env, "AITER_LOG_TUNED_CONFIG"),
            quiet=_flag(env, "GEMMTUNED_QUIET"),
            live_check=_count(env, "GEMMTUNED_LIVE_CHECK"),
            graph_wait_s=_seconds(env, "GEMMTUNED_GRAPH_WAIT_S", 5.0),
            sync=env.get("GEMMTUNED_SYNC", "").strip(),
            sync_name=env.get("GEMMTUNED_SYNC_NAME", ""),
            sync_key=_path(env, "GEMMTUNED_SYNC_KEY"),
            sync_hosts=tuple(env.get("GEMMTUNED_SYNC_HOSTS", "").replace(",", " ").split()),
            recapture=env.get("GEMMTUNED_RECAPTURE") or "off",
            patches=tuple(env.get("GEMMTUNED_PATCH", "").replace(",", " ").split()),
            without=tuple(env.get("GEMMTUNED_WITHOUT", "").replace(",", " ").split()),
        )


def wants_activation(env: Mapping[str, str] | None = None) -> bool:
    """True when the environment switches capture or dispatch on; it only reads three variables."""
    env = os.environ if env is None else env
    return _switch(env) or _flag(env, "GEMMTUNED_DISPATCH")


def wrong_variables(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of ours with a value that cannot be used, each with what is wrong."""
    env = os.environ if env is None else env
    from gemmtuned.configs.variables import VARIABLES  # a program that is switched off needs none of it

    wrong = {}
    for name in (variable.name for variable in VARIABLES if variable.name in env):
        alone = {"GEMMTUNED_HOME": "/", name: env[name]}  # so that a missing home folder is not blamed on it
        try:
            Settings._read(alone)
            trusted_uid(alone)
        except SettingError as err:
            wrong[name] = str(err)
    return wrong


def unknown_variables(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables named like ours that we do not know, each with the one that is probably meant; "" if none is near."""
    names = os.environ if env is None else env
    given = [name for name in names if name != "GEMMTUNED" and name.upper().startswith(("GEM", "AITER_"))]
    if not given:
        return {}
    from gemmtuned.configs.misspelt import misspelt  # a program that sets none needs none of it

    return misspelt(given)


def no_color(env: Mapping[str, str] | None = None) -> bool:
    """The NO_COLOR convention (no-color.org): set and not empty."""
    return bool((os.environ if env is None else env).get("NO_COLOR"))


def child_env(**changes: str | None) -> dict[str, str]:
    """The environment for a program that we start: ours with these variables set, or removed where None."""
    env = {name: value for name, value in os.environ.items() if changes.get(name, "") is not None}
    env.update({name: value for name, value in changes.items() if value is not None})
    return env


def unhooked_env(**changes: str | None) -> dict[str, str]:
    """As child_env, for our own processes: without what switches the hook, speaks to systemd, or forbids TF32."""
    off = ("GEMMTUNED", "AITER_TUNE_GEMM", "GEMMTUNED_DISPATCH", "NOTIFY_SOCKET", "NVIDIA_TF32_OVERRIDE")
    return child_env(**dict.fromkeys(off), **changes)


def mps_pipe(env: Mapping[str, str] | None = None) -> str:
    """The control pipe of CUDA's multi-process service and its owner, if a process listens on it; "" if not.

    Any user can put such a pipe into /tmp, so it is no proof that the service runs.
    """
    folder = (os.environ if env is None else env).get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"  # noqa: S108
    path = Path(folder) / "control"
    try:
        facts = path.lstat()
    except OSError as err:
        return f"{path}, closed to us" if isinstance(err, PermissionError) else ""
    if not stat.S_ISFIFO(facts.st_mode):
        return ""
    try:  # a pipe without a reader, left over from a service that died, cannot be opened
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError as err:
        if not isinstance(err, PermissionError):  # a PermissionError means that it is there, and another user's
            return ""
    return f"{path} of uid {facts.st_uid}"


def trusted_uid(env: Mapping[str, str] | None = None) -> int | None:
    """The user id of GEMMTUNED_TRUST. Raises SettingError for a user that this machine does not have."""
    name = (os.environ if env is None else env).get("GEMMTUNED_TRUST", "")
    if not name:
        return None
    number = whole(name)
    if number is not None and number < 1 << 32:
        return number
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError) as err:  # none of that name; no text that could be one
        raise SettingError(f"GEMMTUNED_TRUST must be a user of this machine, got {name!r}") from err


def notify_socket(env: Mapping[str, str] | None = None) -> str:
    """The socket on which systemd waits for our readiness; "" when we are not its service."""
    return (os.environ if env is None else env).get("NOTIFY_SOCKET", "")


def watchdog_s(env: Mapping[str, str] | None = None) -> float | None:
    """How often systemd wants a sign of life from this process; None if it wants none."""
    env = os.environ if env is None else env
    every_us, pid = whole(env.get("WATCHDOG_USEC", "")), env.get("WATCHDOG_PID", "")
    return every_us / 1e6 if every_us and pid in ("", str(os.getpid())) else None


BATCH_INVARIANT: Final = "GEMMTUNED_BATCH_INVARIANT"
_INVARIANT: Final = (BATCH_INVARIANT, "VLLM_BATCH_INVARIANT", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE")
_SGLANG_FLAG: Final = "--enable-deterministic-inference"


def batch_invariance(env: Mapping[str, str] | None = None, argv: Sequence[str] | None = None) -> str:
    """The variable or flag that asks for results that do not depend on the batch; "" if none does.

    vLLM and SGLang have variables of their own, and may set them after we were switched on.  Ours has precedence,
    because it asks for our kernels.
    """
    env = os.environ if env is None else env
    for name in _INVARIANT:
        if env.get(name, "0").strip().lower() in ("1", "true", "yes", "on", "y"):
            return name
    return _SGLANG_FLAG if _SGLANG_FLAG in (getattr(sys, "argv", ()) if argv is None else argv) else ""


def autoload_enabled(env: Mapping[str, str] | None = None) -> bool:
    """False when TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling our entry point."""
    return (os.environ if env is None else env).get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"


def is_given(name: str, env: Mapping[str, str] | None = None) -> bool:
    """Whether a variable has a value."""
    return bool((os.environ if env is None else env).get(name))


def allows_plugin(variable: str, plugin: str, env: Mapping[str, str] | None = None) -> bool:
    """Whether an engine's variable, a list with commas, allows this plugin; also if it is not set."""
    names = (os.environ if env is None else env).get(variable)
    return not names or plugin in names.split(",")


def _switch(env: Mapping[str, str]) -> bool:
    return _flag(env, "GEMMTUNED", default=_flag(env, "AITER_TUNE_GEMM"))


def _flag(env: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    text = env.get(name, "")
    if text == "":
        return default
    if text not in ("0", "1"):
        raise SettingError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name) or str(default)
    value = decimal(text)
    if value is None:
        raise SettingError(f"{name} must be a number of seconds, got {text!r}")
    if not 0 <= value < 1e9:
        raise SettingError(f"{name} must be 0 or more seconds and less than 1e9, got {text!r}")
    return value


def _count(env: Mapping[str, str], name: str) -> int:
    value = _number({name: env.get(name) or "0"}, name)
    if value is None:
        raise SettingError(f"{name} must be a whole number, got {env[name]!r}")
    return value


def _path(env: Mapping[str, str], name: str) -> Path | None:
    text = env.get(name, "")
    if "\0" in text:
        raise SettingError(f"{name} must be a path, got {text!r}")
    return _expanded(text) if text else None


def _expanded(text: str) -> Path:
    path = Path(text)
    try:
        path = path.expanduser()
    except RuntimeError:  # `~` of a user without a home folder: a folder of that name, then
        pass
    return path.absolute()


def _tables(env: Mapping[str, str]) -> tuple[UserTables, ...]:
    """The tables that the AITER_CONFIG_* variables name; several paths in one are separated as in PATH."""
    if not any(name.startswith("AITER_CONFIG_") for name in env):
        return ()
    from gemmtuned.configs.variables import AITER_CONFIGS

    found = []
    for variable, family in AITER_CONFIGS.items():
        texts = [text for text in env.get(variable, "").split(os.pathsep) if text.strip()]
        if any("\0" in text for text in texts):
            raise SettingError(f"{variable} must be paths parted by {os.pathsep!r}, got {env[variable]!r}")
        if texts:
            paths = (_expanded(text.strip()) for text in texts)
            found.append(UserTables(variable, family, tuple(dict.fromkeys(paths))))
    return tuple(found)


def _ranks(env: Mapping[str, str]) -> int:
    return _number(env, "WORLD_SIZE") or 1


def _number(env: Mapping[str, str], name: str) -> int | None:
    """The number in a variable of another program, which may contain anything."""
    number = whole(env.get(name, ""))
    return number if number is not None and number < 1_000_000_000 else None


def _program() -> str:
    argv = getattr(sys, "argv", [""]) or [""]
    return Path(argv[0]).name or "python"


def _shared_locks() -> Path:
    """A folder to which every user of the machine may add files, the same for all."""
    folders = [Path("/run/lock/gemmtuned"), Path("/run/lock"), Path("/tmp")]  # noqa: S108  only ever locked, its content is shown and not believed
    return next((p for p in folders if p.is_dir() and p.stat().st_mode & 0o1777 == 0o1777), folders[-1])


def _default_home(env: Mapping[str, str]) -> Path:
    found = _user_folder(env, "XDG_STATE_HOME", ".local/state")
    if found is None:
        raise SettingError(
            "this user has no home folder (HOME is not set, the user database has none): set GEMMTUNED_HOME to a "
            "folder of your own"
        )
    return found


def _user_folder(env: Mapping[str, str], variable: str, usual: str) -> Path | None:
    """Our folder by the XDG base directory specification; None where the user has no home folder."""
    named = env.get(variable, "").strip()
    if named.startswith("/") and "\0" not in named:  # others are to be ignored
        return Path(named, "gemmtuned")
    home = env.get("HOME") or _home_of_user()
    return Path(home, usual, "gemmtuned").absolute() if home else None


def _home_of_user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except (KeyError, OSError):
        return ""


def _printable(text: str) -> str:
    """Replace the stand-ins for bytes that are not UTF-8, which no database accepts."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
