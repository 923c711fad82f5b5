"""Files of records: reading one record by its number, and writing."""
