"""Graph passes, one file each. Import as ``cadence_fx.passes``."""

if __name__ != "cadence_fx.passes":
    raise ImportError(f"{__name__!r} is a folder of cadence_fx: import cadence_fx.passes")
