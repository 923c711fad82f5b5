"""Configs of runs: gin files, checked before anything is built, with a check for unused bindings.

The order of use is `load` → `build_bound`/`get_macro`/`set_macro` → `build` → `check_all_used` →
`config_text`/`operative_config_text`. Every fault in a config raises a `ConfigError` with the
fault, its location and the remedy. There is one config per process, since gin has one.
"""

from ddl.config.current import (
    build,
    build_bound,
    check_all_used,
    config_text,
    differences,
    get_macro,
    imported_modules,
    is_withheld,
    load,
    operative_config_text,
    places_mentioned,
    read,
    set_macro,
    withhold_macro,
)

__all__ = [
    "build",
    "build_bound",
    "check_all_used",
    "config_text",
    "differences",
    "get_macro",
    "imported_modules",
    "is_withheld",
    "load",
    "operative_config_text",
    "places_mentioned",
    "read",
    "set_macro",
    "withhold_macro",
]
