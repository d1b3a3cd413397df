"""The version, in one place: the build reads it here."""

VERSION = "0.2.0"
