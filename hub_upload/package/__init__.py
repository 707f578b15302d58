"""A folder that loads with one line."""

from hub_upload.package.assemble import package, remote_code_files


__all__ = ["package", "remote_code_files"]
