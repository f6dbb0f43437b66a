"""Contracts and drop-ins for decoder families, one file each. Import as ``cadence_fx.adapters``."""

if __name__ != "cadence_fx.adapters":
    raise ImportError(f"{__name__!r} is a folder of cadence_fx: import cadence_fx.adapters")
