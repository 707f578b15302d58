"""What every command needs: files, records, targets, tables."""
