"""Builds the engine's modules with mypyc where a C compiler is there; without one they run interpreted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NETWORK = ROOT / "netsim" / "network"


def _build_module() -> Any:
    """`netsim.network.build`, without importing what the package depends on."""
    spec = importlib.util.spec_from_file_location("netgym_build", NETWORK / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildEngine(build_ext):
    """Compiles what can be compiled, and writes the hash of the sources alongside it."""

    def run(self) -> None:
        """Build, then write the hash."""
        super().run()
        built = [Path(name) for name in self.get_outputs() if Path(name).exists()]
        engine = [path for path in built if path.name.startswith("engine.")]
        folders = [path.parent for path in engine] + ([NETWORK] if self.inplace and engine else [])
        for folder in folders:
            (folder / "compiled.sha256").write_text(_build_module().source_hash() + "\n")


def _extensions() -> list[Any]:
    """The engine's modules as extensions that may fail to build; none where mypyc does not run."""
    try:
        from mypyc.build import mypycify

        names = [f"netsim/network/{name}.py" for name in _build_module().MODULES]
        options = ["--follow-imports=skip", "--ignore-missing-imports"]
        extensions = mypycify([*options, *names], opt_level="2", group_name="netsim_network")
    except (ImportError, OSError, SystemExit) as error:
        print(f"the engine is not compiled and runs interpreted: {error}", file=sys.stderr)
        return []
    for extension in extensions:
        extension.optional = True
        if sys.platform != "win32":
            # Multiply-add in one rounding, as some compilers do unasked, would change the last bits. All functions of
            # the library are exported: unless no other may replace them, compilers do not inline one into another.
            options = ["-ffp-contract=off", "-fno-semantic-interposition"]
            extension.extra_compile_args = [*(extension.extra_compile_args or []), *options]
    return list(extensions)


# An editable install of a checkout that is compiled already, with other extras, say, need not compile again; and what
# pip asks before it builds does not depend on extensions.
is_compiled = "editable_wheel" in sys.argv and _build_module().is_up_to_date()
is_asked = not {"egg_info", "dist_info"}.isdisjoint(sys.argv)
setup(ext_modules=[] if is_compiled or is_asked else _extensions(), cmdclass={"build_ext": BuildEngine})
